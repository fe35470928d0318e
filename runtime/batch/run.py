"""A job from its input to its output: rows in, answers to the journal, files at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ...errors import UsageError
from .inputs.lines import BadLine, BatchLine, CustomIds, parse_row, refuse_duplicate
from .inputs.sources import Row, Source
from .inputs.templates import PromptTemplate
from .jobs.job import CANCEL_FILE, CANCELLED, FINISHED, RUNNING, Job
from .jobs.journal import Answer, Journal, Totals
from .jobs.output import export
from .jobs.writer import GroupWriter, Tell, while_full
from .workers.offline import failed

_READ_ROWS = 1000
_POLL_SECONDS = 0.5


class Executor(Protocol):
    """Answers lines: an engine of this process, other processes, or a cluster."""

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[Answer]:
        """Yield one answer a line, in any order; ``lines`` may be read in another thread."""

    def facts(self) -> dict[str, Any]:
        """What is to be noted of the run in the journal."""

    def close(self) -> None:
        """Free the models."""


class BatchRun:
    """One run of a job; it begins where the last one stopped.

    Args:
        job: opened, so that no other process works on it.
        source: the rows.
        template: makes requests of records.
        tell: told of ``progress``, ``paused``, ``resumed``, by name with facts.
        stop: ends the run early once it is set; what is answered stays answered.
        endpoint: the only url that lines may ask; None allows all.
        check_model: raises if the model was replaced meanwhile.
    """

    def __init__(
        self,
        job: Job,
        source: Source,
        template: PromptTemplate,
        *,
        tell: Tell = lambda event, facts: None,
        stop: threading.Event | None = None,
        endpoint: str | None = None,
        check_model: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._source = source
        self._template = template
        self._tell = tell
        self._stop = stop or threading.Event()
        self._endpoint = endpoint
        self._check_model = check_model
        self._next_poll = 0.0
        self._rows = 0

    def run(self, executor: Executor) -> Totals:
        """Answer every line that has no answer yet, then write the output; return the sums over all runs.

        Raises:
            CarryallError, OSError: the job cannot go on; the answers so far are kept.
        """
        journal = self._job.journal
        journal.state_facts({"state": RUNNING})
        ids = CustomIds()
        writer = GroupWriter(journal, self._tell, self._stop, self._check)
        try:
            with contextlib.closing(writer):
                for answer in executor.run(self._lines(writer, ids), self._stop):
                    writer.put(answer)
        finally:
            ids.close()
        journal.state_facts(executor.facts())
        self._poll()
        if self._stop.is_set():
            journal.state_facts({"state": CANCELLED})
        elif (answered := journal.totals().answered) != self._rows:
            raise UsageError(
                f"the input ends after {self._rows} lines, but {answered} were answered before; the input "
                "was changed. Restore it, or drop the answers with --restart"
            )
        else:
            finish(self._job, self._tell, self._stop)
        return journal.totals()

    def _check(self) -> None:
        self._check_model()
        self._poll()

    def _poll(self) -> None:
        """Stop if another process asked for it."""
        if (self._job.paths.folder / CANCEL_FILE).exists():
            self._stop.set()

    def _lines(self, writer: GroupWriter, ids: CustomIds) -> Iterator[BatchLine]:
        """The lines to be sent; bad ones are answered here, answered ones are skipped."""
        for rows in _pieces(self._source, _READ_ROWS):
            done = self._job.journal.finished(rows[0].number, rows[-1].number)
            self._rows += len(rows)
            for row in rows:
                if self._stop.is_set():
                    return
                if row.number in done:
                    _pass_over(row, done[row.number], ids)
                    continue
                line = parse_row(row, self._template, self._endpoint)
                if isinstance(line, BatchLine):
                    line = refuse_duplicate(line, row, ids)
                if isinstance(line, BadLine):
                    writer.put(failed(line, line.code, line.message))
                else:
                    yield line
            if time.monotonic() >= self._next_poll:
                self._poll()
                self._next_poll = time.monotonic() + _POLL_SECONDS


def finish(job: Job, tell: Tell, stop: threading.Event) -> None:
    """Write the output of a job that has all answers, and note that it is finished.

    Raises:
        OSError: it cannot be written.
    """
    job.journal.state_facts({"owns_output": True})
    while_full(lambda: export(job.journal, job.paths.output, job.paths.errors), tell, stop)
    job.journal.state_facts({"state": FINISHED, "completed_at": int(time.time())})


def _pieces(source: Source, most: int) -> Iterator[list[Row]]:
    piece: list[Row] = []
    for row in source:
        piece.append(row)
        # A pipe may keep us waiting for more: its lines are sent as they come.
        if len(piece) >= most or not source.rereadable:
            yield piece
            piece = []
    if piece:
        yield piece


def _pass_over(row: Row, done: tuple[bytes, bytes | None], ids: CustomIds) -> None:
    digest, key = done
    if digest != row.digest:
        raise UsageError(
            f"line {row.number} of the input is not the one that was answered before; the input was changed. "
            "Restore it, or drop the answers with --restart"
        )
    if key is not None:
        ids.first_use(key, row.number)


def first_change(journal: Journal, source: Source) -> str:
    """Which answered lines of an input that changed are not what they were, in words."""
    changed, first, answered = 0, None, 0
    for rows in _pieces(source, _READ_ROWS):
        done = journal.finished(rows[0].number, rows[-1].number)
        for row in rows:
            if row.number in done:
                answered += 1
                if done[row.number][0] != row.digest:
                    changed, first = changed + 1, first or row.number
    if first is None:
        return f"the {answered} lines answered so far are as they were"
    return f"{changed} of the lines answered so far changed, the first is line {first}"
