"""``carryall batch``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import click

from ...errors import UsageError
from ...progress import Progress
from ...runtime.batch.lines import LineReader
from ...runtime.batch.output import ResultFile, write_result
from ...runtime.batch.run import BatchRun, BatchSummary
from ...runtime.process.uninterrupted import second_interrupt_ends
from ...runtime.service.handler import LLMHandler
from ...runtime.service.served_model import ServedModel, load_served_model
from ..generation import tell_fallbacks
from ..load_options import Chosen, config_options
from ..options import json_option, print_json, quiet_option
from ..progress import progress
from ..sections import SectionedCommand

STREAM = Path("-")
# Enough lines at hand that a slot which becomes free is filled in the next step.
LINES_PER_SLOT = 2

Record = dict[str, Any]

_READABLE = click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True)
_WRITABLE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.group("batch")
def command() -> None:
    """Work through files of requests."""


@command.command("run", cls=SectionedCommand)
@click.argument("source", metavar="IN", type=_READABLE)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    required=True,
    type=_WRITABLE,
    help="Where the results go; '-' is stdout.",
)
@config_options(model="--model", without=("max_queue",))
@click.option("--max-tokens", type=click.IntRange(1), help="For lines that do not state it.")
@click.option("--temperature", type=click.FloatRange(0), help="For lines that do not state it; 0 is greedy.")
@click.option("--overwrite", is_flag=True, help="Replace OUT.")
@click.option("--resume", is_flag=True, help="Keep what succeeded in OUT or its unfinished run, do the rest.")
@json_option
@quiet_option
def run(
    source: Path,
    output: Path,
    chosen: Chosen,
    max_tokens: int | None,
    temperature: float | None,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Answer every request in IN, a JSONL file, with one line in OUT.

    Lines are OpenAI's batch lines (custom_id, method, url, body; for /v1/completions and
    /v1/chat/completions), or just the body: {"prompt": "..."} or {"messages": [...]}, with sampling options
    beside it. Results come in the order of finishing and name the custom_id. A bad line becomes an error
    result, and the run goes on.

    Results are collected in OUT.partial, which becomes OUT at the end. The exit code is 1 if any line failed.

    \b
    Examples:
        carryall batch run requests.jsonl -o results.jsonl --model ./qwen3 --quantize int4
        echo '{"prompt": "def f(x):"}' | carryall batch run - -o - --model demo
    """
    silent = quiet or as_json
    results, finished = _results(source, output, overwrite=overwrite, resume=resume, as_json=as_json)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(_open(source))
        with progress("prepare", quiet=silent) as tell:
            served = load_served_model(chosen.model, engine_config=chosen.engine, progress=tell)
        stack.callback(served.llm.shutdown)
        tell_fallbacks(served.fallbacks)
        stream = stack.enter_context(results.open()) if results else sys.stdout.buffer
        tell = stack.enter_context(progress("batch", quiet=silent or source == STREAM))
        own = {name: value for name, value in given.items() if value is not None}
        reader = LineReader(lines, {**served.defaults, **own})
        start = time.perf_counter()
        summary = asyncio.run(_work(served, reader, _writer(stream, reader, tell, source), finished))
    _show(summary, time.perf_counter() - start, as_json=as_json, quiet=quiet)
    return 1 if summary.failed else 0


def _results(
    source: Path, output: Path, *, overwrite: bool, resume: bool, as_json: bool
) -> tuple[ResultFile | None, set[str]]:
    """Return where results go, None for stdout, and the custom_ids that have one."""
    if output == STREAM:
        if overwrite or resume or as_json:
            raise UsageError("--overwrite, --resume and --json need a file as OUT, not stdout")
        return None, set()
    if overwrite and resume:
        raise UsageError("--overwrite and --resume exclude each other")
    if source != STREAM and output.exists() and output.samefile(source):
        raise UsageError(f"{output} is the input; write the results elsewhere")
    results = ResultFile(output)
    if resume:
        return results, results.resume()
    results.start(overwrite=overwrite)
    return results, set()


def _open(source: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if source == STREAM else source.open("rb")


def _writer(stream: BinaryIO, reader: LineReader, tell: Progress, source: Path) -> Callable[[Record], None]:
    """Return what takes a result; progress is by bytes read, since lines would have to be counted first."""
    total = 0 if source == STREAM else source.stat().st_size

    def write(record: Record) -> None:
        write_result(stream, record)
        tell(reader.bytes_read, total, "")

    return write


async def _work(
    served: ServedModel, reader: LineReader, write: Callable[[Record], None], finished: set[str]
) -> BatchSummary:
    handler = LLMHandler()
    handler.ready(served)
    with second_interrupt_ends():
        return await BatchRun(handler, write, finished).run(
            iter(reader), served.info.max_slots * LINES_PER_SLOT
        )


def _show(summary: BatchSummary, seconds: float, *, as_json: bool, quiet: bool) -> None:
    rate = summary.completion_tokens / max(seconds, 1e-9)
    if as_json:
        facts = {
            "completed": summary.completed,
            "failed": summary.failed,
            "skipped": summary.skipped,
            "errors": summary.errors,
            "prompt_tokens": summary.prompt_tokens,
            "completion_tokens": summary.completion_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(rate, 1),
        }
        print_json(facts)
    elif not quiet:
        reasons = ", ".join(f"{count} {code}" for code, count in sorted(summary.errors.items()))
        failed = f"{summary.failed} failed" + (f" ({reasons})" if reasons else "")
        work = f"{summary.completion_tokens} tokens in {seconds:.1f} s, {rate:.0f} tokens/s"
        click.echo(f"{summary.completed} completed, {failed}, {summary.skipped} skipped; {work}", err=True)
