"""Run a batch job from the command line, with progress, signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..errors import UsageError
from ..runtime.batch.execute import execute, make_executor
from ..runtime.batch.spec import BatchSpec
from ..runtime.batch.stream import stream
from ..runtime.process.stop_signals import stop_signals
from .batch_progress import BatchProgress, show_outcome
from .options import text_or_file
from .progress import PREPARE, progress


def run_job(spec: BatchSpec, *, restart: bool, as_json: bool, quiet: bool) -> int:
    """Execute a job with progress on stderr; return the exit code."""
    display = BatchProgress(as_json=as_json, quiet=quiet)
    with stopping() as (stop, code), progress(PREPARE, quiet=quiet or as_json) as tell:
        try:
            outcome = execute(spec, restart=restart, tell=display.tell, stop=stop, progress=tell)
        finally:
            display.close()
    show_outcome(spec, outcome, display, as_json=as_json, quiet=quiet)
    if not outcome.finished:
        return code() or 1
    return 1 if outcome.totals.failed else 0


@contextlib.contextmanager
def stopping() -> Iterator[Any]:
    """Let Ctrl-C and SIGTERM stop a job between two steps; a second one ends it at once.

    An ignored one stays so.

    Yields:
        The event that the signals set, and a function that returns the exit code, 0 without a signal.
    """
    stop = threading.Event()
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received.append(number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop, lambda: 0
        return
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield stop, lambda: 128 + received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_stdout(spec: BatchSpec, *, restart: bool, as_json: bool, quiet: bool) -> int:
    """Answer lines to stdout, without a journal; return the exit code."""
    if restart or as_json or spec.job or spec.errors:
        raise UsageError("--restart, --json, --job and --errors need a file as OUT, not stdout")
    source = spec.source()
    with stopping() as (stop, code), progress(PREPARE, quiet=quiet) as tell:
        executor = make_executor(spec, spec.model, 0, tell)
        with contextlib.closing(executor):
            totals = stream(
                executor, source, spec.prompt_template(), _print_line, endpoint=spec.endpoint, stop=stop
            )
    return code() or (1 if totals.failed else 0)


def _print_line(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def sampling_fields(
    max_tokens: int | None, temperature: float | None, json_schema: str | None, choice: tuple[str, ...]
) -> dict[str, Any]:
    """Return the job's sampling options as fields of ``BatchSpec.sampling``."""
    if json_schema is not None and choice:
        raise UsageError("--json-schema and --choice exclude each other")
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if json_schema is not None:
        text = text_or_file(json_schema, bare=True) or ""
        try:
            sampling["structured_output"] = {"json_schema": json.loads(text)}
        except ValueError as error:
            raise UsageError(f"--json-schema is not JSON: {error}") from error
    if choice:
        sampling["structured_output"] = {"choice": list(choice)}
    return {name: value for name, value in sampling.items() if value is not None}
