"""``carryall batch``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ...errors import UsageError
from ...runtime.batch.execute import Outcome, execute, make_executor
from ...runtime.batch.inputs.files import STREAM
from ...runtime.batch.inputs.lines import URLS
from ...runtime.batch.spec import BatchSpec
from ...runtime.batch.stream import stream
from ...storage.texts import read_text
from ..batch_progress import BatchProgress
from ..load_options import Chosen, chosen_fields, config_options
from ..options import print_json, quiet_option
from ..progress import progress
from ..sections import SectionedCommand
from .batch_jobs import cancel, merge, report, retry_failed, status

json_events_option = click.option(
    "--json", "as_json", is_flag=True, help="Print events as lines of JSON, the last one with the totals."
)


@click.group("batch", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Answer files of requests: resumable, every line exactly once."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command("run", cls=SectionedCommand)
@config_options(model="--model", without=("max_queue", "max_step_slowdown", "logits_processors"))
@click.argument("sources", metavar="IN...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="OUT", required=True,
              help="Results, as JSON lines or .parquet: a file, a URL, or '-' (stdout).")  # fmt: skip
@click.option("--errors", metavar="FILE", help="File for failed lines; by default OUT with '.errors'.")
@click.option("--job", metavar="DIR", help="Folder of the job's journal; OUT.job by default.")
@click.option("--restart", is_flag=True, help="Delete all answers and OUT, and start again.")
@click.option("--worker", "providers", metavar="PROVIDER", multiple=True,
              help="Run a worker process on PROVIDER, in place of --provider. May be repeated.")  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Run workers on a Ray cluster; 'local' starts one.")
@click.option("--ray-workers", type=click.IntRange(1), default=1, show_default=True,
              help="Number of Ray workers; each is an actor that holds the model.")  # fmt: skip
@click.option("--endpoint", type=click.Choice(URLS), help="Refuse lines with another url.")
@click.option("--template", metavar="TEXT|@FILE",
              help="Jinja template for the prompt of a record: 'Summarize: {{ text }}'.")  # fmt: skip
@click.option("--as", "kind", type=click.Choice(["prompt", "chat", "embedding"]), default="prompt",
              show_default=True, help="How the template's text is used.")  # fmt: skip
@click.option("--system", metavar="TEXT|@FILE", help="System message for --as chat; also a template.")
@click.option("--id-column", metavar="NAME", help="Column with the custom_id.")
@click.option("--keep", metavar="NAME", multiple=True, help="Column to copy to the output. May be repeated.")
@click.option("--max-tokens", type=click.IntRange(1), help="Default for lines without max_tokens.")
@click.option(
    "--temperature", type=click.FloatRange(0), help="Default for lines without temperature; 0 is greedy."
)
@click.option("--json-schema", metavar="TEXT|@FILE", help="JSON schema of all answers.")
@click.option("--choice", metavar="TEXT", multiple=True, help="A possible answer. May be repeated.")
@click.option("--seed", type=int, default=0, show_default=True,
              help="Seed from which lines without one derive theirs.")  # fmt: skip
@json_events_option
@quiet_option
def run(
    sources: tuple[str, ...],
    output: str,
    restart: bool,
    as_json: bool,
    quiet: bool,
    chosen: Chosen,
    max_tokens: int | None,
    temperature: float | None,
    json_schema: str | None,
    choice: tuple[str, ...],
    **given: Any,
) -> int:
    """Answer every line of IN, one line of OUT each, in the order of the input.

    IN is JSON lines, CSV or Parquet: files, globs, URLs (s3://...), or '-' for stdin; .gz, .bz2, .xz and .zst
    are decompressed. JSON lines are OpenAI's batch lines (custom_id, method, url, body), or just the body:
    {"prompt": "..."}, {"messages": [...]}, {"input": "..."}. Records of tables need --template.

    Answers are stored in OUT.job until OUT is written at the end. After any interruption, run the same
    command again: answered lines are kept. A changed input, model or option is refused; --restart deletes
    the answers instead. Failed lines go to a separate file, and the exit code is then 1.

    \b
    Examples:
        carryall batch run requests.jsonl -o results.jsonl --model ./qwen3 --quantize int4
        carryall batch run 'in/*.csv' -o out.parquet --model ./qwen3 --as chat --template @prompt.txt
        echo '{"prompt": "def f(x):"}' | carryall batch run - -o - --model demo
    """
    sampling = _sampling(max_tokens, temperature, json_schema, choice)
    for name in ("template", "system"):
        given[name] = _text_or_file(name, given[name])
    spec = BatchSpec(inputs=list(sources), output=output, **chosen_fields(chosen), sampling=sampling, **given)
    if output == STREAM:
        return _run_to_stdout(spec, restart=restart, as_json=as_json, quiet=quiet)
    return run_job(spec, restart=restart, as_json=as_json, quiet=quiet)


command.add_command(status)
command.add_command(cancel)
command.add_command(merge)
command.add_command(report)
command.add_command(retry_failed)


def run_job(spec: BatchSpec, *, restart: bool, as_json: bool, quiet: bool) -> int:
    """Execute a job with progress on stderr; return the exit code."""
    display = BatchProgress(as_json=as_json, quiet=quiet)
    with stopping() as (stop, code), progress("prepare", quiet=quiet or as_json) as tell:
        try:
            outcome = execute(spec, restart=restart, tell=display.tell, stop=stop, progress=tell)
        finally:
            display.close()
    _show(spec, outcome, display, as_json=as_json, quiet=quiet)
    if not outcome.finished:
        return code() or 1
    return 1 if outcome.totals.failed else 0


@contextlib.contextmanager
def stopping() -> Iterator[Any]:
    """Let Ctrl-C and SIGTERM stop a job between two steps; a second Ctrl-C ends it at once.

    Yields:
        The event that the signals set, and a function that returns the exit code, 0 without a signal.
    """
    stop = threading.Event()
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        received.append(number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop, lambda: 0
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, lambda: 128 + received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_to_stdout(spec: BatchSpec, *, restart: bool, as_json: bool, quiet: bool) -> int:
    if restart or as_json or spec.job or spec.errors:
        raise UsageError("--restart, --json, --job and --errors need a file as OUT, not stdout")
    source = spec.source()
    with stopping() as (stop, code), progress("prepare", quiet=quiet) as tell:
        executor = make_executor(spec, spec.model, 0, tell)
        with contextlib.closing(executor):
            totals = stream(
                executor, source, spec.prompt_template(), _print_line, endpoint=spec.endpoint, stop=stop
            )
    return code() or (1 if totals.failed else 0)


def _print_line(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _sampling(
    max_tokens: int | None, temperature: float | None, json_schema: str | None, choice: tuple[str, ...]
) -> dict[str, Any]:
    if json_schema is not None and choice:
        raise UsageError("--json-schema and --choice exclude each other")
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if json_schema is not None:
        text = _text_or_file("json-schema", json_schema) or ""
        try:
            sampling["structured_output"] = {"json_schema": json.loads(text)}
        except ValueError as error:
            raise UsageError(f"--json-schema is not JSON: {error}") from error
    if choice:
        sampling["structured_output"] = {"choice": list(choice)}
    return {name: value for name, value in sampling.items() if value is not None}


def _text_or_file(name: str, value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    return read_text(Path(value[1:]))


def _show(spec: BatchSpec, outcome: Outcome, display: BatchProgress, *, as_json: bool, quiet: bool) -> None:
    facts = display.pace.facts(outcome.totals)
    state = "finished" if outcome.finished else "stopped"
    if as_json:
        print_json({"event": state, **facts, "job": str(outcome.folder), "output": spec.output})
        return
    totals = outcome.totals
    if not outcome.finished:
        click.echo(
            f"stopped: {totals.answered} lines are answered; run the same command to continue, or "
            f"'carryall batch merge {outcome.folder} -o FILE' to write these answers",
            err=True,
        )
    elif not quiet:
        reasons = ", ".join(f"{count} {code}" for code, count in sorted(totals.errors.items()))
        lines = f"{totals.completed} completed, {totals.failed} failed" + (f" ({reasons})" if reasons else "")
        if outcome.answered_before == totals.answered:
            click.echo(f"{spec.output} was already finished: {lines}", err=True)
        else:
            seconds, rate = facts["seconds"], facts["tokens_per_second"]
            click.echo(f"{lines}; {seconds:.1f} s, {rate:.0f} tokens/s", err=True)
    if totals.failed:  # also when quiet: it is why the exit code is 1
        click.echo(f"failed lines are in {spec.paths.errors}", err=True)
