"""The command group: finds verbs by module name and turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import signal
import sys
import traceback
import warnings
from typing import Any, NoReturn

import click

from ..errors import DEBUG_VARIABLE, CarryallError, UsageError

# The verbs and their one line of help, so that `carryall --help` imports none of them.
SECTIONS: dict[str, dict[str, str]] = {
    "Make a model ready": {
        "export": "Turn a Hugging Face checkpoint into a portable ONNX package.",
        "quantize": "Make a package smaller and faster with int4 weights.",
        "optimize": "Rewrite a model's graph for a target, and show what changed.",
    },
    "Use it": {
        "run": "Generate text from one prompt.",
        "chat": "Talk with a model.",
        "serve": "Serve models over the network.",
        "batch": "Answer files of requests, every line exactly once.",
    },
    "Measure and check": {
        "bench": "Measure prefill and decode speed.",
        "eval": "Measure how well a model predicts a text.",
        "inspect": "Show what is inside a model: operators, weights, KV cache, sizes.",
        "verify": "Check that two models agree, or that a package is whole.",
        "diff": "Show how the graphs of two models differ.",
        "cache": "List, prune or clear what was prepared for the next time.",
        "doctor": "Check this machine: libraries, providers, memory speed.",
    },
    "Get to know it": {
        "demo": "Export, optimize, quantize and run the embedded model, in seconds.",
        "families": "List the model families that can be exported.",
    },
}
_LONGEST_WORD, _KEPT = 1000, 60  # characters of a word in a message, and of each end of a longer one
SUMMARIES = {verb: summary for verbs in SECTIONS.values() for verb, summary in verbs.items()}


class VerbGroup(click.Group):
    """A click group whose commands are the modules in ``verbs``, each exporting ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs, in the order in which the help shows them."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import the verb's module and return its command."""
        if cmd_name not in SUMMARIES:
            near = difflib.get_close_matches(cmd_name, SUMMARIES, n=1)
            ctx.fail(f"there is no verb '{cmd_name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
        module = importlib.import_module(f".verbs.{cmd_name}", __package__)
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section, from the table instead of from the modules."""
        width = max(map(len, SUMMARIES))
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(verb.ljust(width), summary) for verb, summary in verbs.items()])

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and end the process: 0 done, 1 the work failed, 2 wrong use, 130 Ctrl-C."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]
                code = super().main(*args, **{**extra, "standalone_mode": False})
        except click.exceptions.Abort:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of what the end of the process does
            _fail("interrupted", 130)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "carryall"
            _fail(f"{error.format_message().rstrip('.')} (see '{path} --help')", 2)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except UsageError as error:
            _fail(str(error), 2)
        except (CarryallError, OSError) as error:
            _fail(str(error), 1)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    """Write one line to stderr (and the traceback, when debugging), then exit."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    click.echo("error: " + _one_line(message), err=True)
    sys.exit(code)


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
    """One model, carried to every device.

    carryall turns a language model into a portable ONNX package, optimizes and quantizes it for the
    device at hand, and generates text with it, alone, as a service, or over files of requests.

    Wherever a MODEL is expected, give a package, a Hugging Face folder or hub id, an ONNX file, or "demo"
    for the small model that comes along.

    \b
    Start here:
        carryall demo
        carryall run demo "def fibonacci(n):"
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
