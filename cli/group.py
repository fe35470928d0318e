"""The command group: finds verbs by module name, and prints errors as one line with an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from ..errors import DEBUG_VARIABLE, CarryallError, UsageError, is_debugging
from ..runtime.process.garbage import collector_paused, lasting_objects
from .stderr import discard, lenient_stderr

# The verbs with one line of help each, so that `carryall --help` imports none of them.
SECTIONS: dict[str, dict[str, str]] = {
    "Prepare a model": {
        "export": "Convert a Hugging Face checkpoint to a portable ONNX package.",
        "quantize": "Quantize the weights of a model, and optionally its KV cache.",
        "optimize": "Optimize a model's graph for a target, and show what changed.",
    },
    "Run a model": {
        "pull": "Download a model from the Hugging Face hub.",
        "run": "Ask a model one question, or talk to it.",
        "chat": "Chat with a model.",
        "serve": "Serve models over the network.",
        "agent": "Start a coding agent on a local model.",
        "embed": "Print the vectors of texts.",
        "rerank": "Sort documents by how well they answer a query.",
        "batch": "Answer files of requests, every line exactly once.",
    },
    "Measure and check": {
        "plan": "Show which form of a model fits, and the speed to expect.",
        "bench": "Measure prefill and decode speed.",
        "eval": "Measure perplexity, and the divergence from a reference model.",
        "inspect": "Show operators, weights, KV cache and sizes of a model.",
        "verify": "Compare two models, or check the files of a package.",
        "diff": "Compare the graphs of two models.",
        "detect": "Look for a watermark in a text.",
        "list": "List downloaded and prepared models (ls does the same).",
        "rm": "Delete a downloaded model, and what was prepared of it.",
        "cache": "List, prune or clear the cache of prepared models.",
        "doctor": "Check this machine: libraries, providers, memory bandwidth.",
    },
    "Explore": {
        "demo": "Export, optimize, quantize and run the embedded model, in seconds.",
        "families": "List the model families that can be exported.",
    },
}
_LONGEST_WORD, _KEPT = 1000, 60  # characters of a word in a message, and of each end of a longer one
_ALIASES = {"ls": "list"}
_PRODUCT_THREADS = "OPENBLAS_NUM_THREADS"
SUMMARIES = {verb: summary for verbs in SECTIONS.values() for verb, summary in verbs.items()}


class VerbGroup(click.Group):
    """A click group whose commands are the modules in ``verbs``, each exporting ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs, in the order in which the help shows them."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import the verb's module and return its command."""
        cmd_name = _ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in SUMMARIES:
            import difflib  # 1 ms, for a mistake

            near = difflib.get_close_matches(cmd_name, SUMMARIES, n=1)
            ctx.fail(f"there is no verb '{cmd_name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        with collector_paused(), _lone_products():
            module = importlib.import_module(f".verbs.{cmd_name}", __package__)
            ctx.with_resource(lasting_objects())  # modules stay: a collection takes 20 ms to see that
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section, without importing their modules."""
        width = max(map(len, SUMMARIES))
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(verb.ljust(width), summary) for verb, summary in verbs.items()])

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line, and end the process: 0 success, 1 failure, 2 wrong use, 130 Ctrl-C."""
        with lenient_stderr():
            self._main(*args, **extra)

    def _main(self, *args: Any, **extra: Any) -> NoReturn:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]
                code = super().main(*args, **{**extra, "standalone_mode": False})
        except click.exceptions.Abort:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C must not print a traceback at exit
            _fail("interrupted", 130)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "carryall"
            _fail(f"{error.format_message().rstrip('.')} (see '{path} --help')", 2)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except UsageError as error:
            _fail(str(error), 2)
        except OSError as error:
            from ..runtime.process.open_files import too_many_open

            _fail(_shortage(error) or f"{error}{too_many_open(error)}", 1)
        except CarryallError as error:
            _fail(str(error), 1)
        except (MemoryError, RuntimeError, ImportError) as error:
            if not (shortage := _shortage(error)):
                raise
            _fail(shortage, 1)
        _end(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _lone_products() -> Iterator[None]:
    """Let NumPy, if the block imports it, compute each product with one thread, unless its variable is set.

    OpenBLAS starts a thread for each further core when it is loaded, which waits for work without sleeping:
    40 ms of processor time a core. Products of several threads wait so too (see ``single_products``). The
    variable is removed, since programs that a verb starts inherit it.
    """
    if _PRODUCT_THREADS in os.environ:
        yield
        return
    os.environ[_PRODUCT_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_PRODUCT_THREADS]


def _end(code: int) -> NoReturn:
    """End the process; if stdout does not accept the last output, with an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        if isinstance(error, OSError):
            discard(sys.stdout)
        if not code:
            click.echo(f"error: stdout: {error}", err=True)
            code = 1
    sys.exit(code)


def _shortage(error: Exception) -> str:
    """What this process has too little of, if that is the reason of an error; otherwise ""."""
    from ..runtime.process.memory import memory_exhausted

    text = str(error)
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return f"{text}: the limit of threads or of memory is reached ('ulimit -u', 'ulimit -v')"
    return memory_exhausted(error)


def _fail(message: str, code: int) -> NoReturn:
    """Print one line to stderr (and the traceback, if CARRYALL_DEBUG is set), then exit."""
    if is_debugging():
        traceback.print_exc()
    click.echo("error: " + _one_line(message), err=True)
    _end(code)


def _one_line(message: str) -> str:
    """The words of a message; of a value of thousands of characters, its beginning and its end."""
    words = (
        word if len(word) <= _LONGEST_WORD else f"{word[:_KEPT]}...{word[-_KEPT:]}"
        for word in message.split()
    )
    return " ".join(words)


def _show_warning(message: Warning | str, *_: object) -> None:
    click.echo("warning: " + _one_line(str(message)), err=True)


def _set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        os.environ[DEBUG_VARIABLE] = "1"


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import importlib.metadata  # slow to import

        click.echo(f"carryall {importlib.metadata.version('carryall')}")
        ctx.exit()


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.pass_context
@click.option("--debug", is_flag=True, expose_value=False, callback=_set_debug,
              help=f"Show the traceback of an error ({DEBUG_VARIABLE}=1 does the same).")  # fmt: skip
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
              help="Show the version and exit.")  # fmt: skip
def carryall(ctx: click.Context) -> None:
    """Export, optimize, quantize and run language models as portable ONNX packages.

    carryall exports a language model to a portable ONNX package, optimizes and quantizes it for a device,
    and generates text with it: from a prompt, as a service, or over files of requests.

    MODEL is a package, a checkpoint folder, a hub id, a GGUF file, an ONNX file or its folder, or "demo".

    \b
    Start here:
        carryall demo
        carryall run demo "def fibonacci(n):"
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
