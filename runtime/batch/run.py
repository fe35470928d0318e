"""Run a job: read rows, commit answers to the journal, write the output files at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ...errors import UsageError
from ..process.garbage import lasting_objects
from .inputs.lines import BadLine, BatchLine, CustomIds, parse_row, refuse_duplicate
from .inputs.sources import Source, SourceRow
from .inputs.templates import PromptTemplate
from .jobs.job import CANCEL_FILE, CANCELLED, FINISHED, RUNNING, Job
from .jobs.journal import Journal, LineResult, Totals
from .jobs.output import export
from .jobs.writer import GroupWriter, Tell, while_full
from .workers.offline import failed

_READ_ROWS = 1000
_POLL_SECONDS = 0.5


class Executor(Protocol):
    """Answers lines, with an engine in this process, other processes, or a cluster."""

    def run(self, lines: Iterator[BatchLine], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer a line, in any order; ``lines`` may be read in another thread."""

    def facts(self) -> dict[str, Any]:
        """Return facts about the run for the journal."""

    def close(self) -> None:
        """Free the models."""


class BatchRun:
    """One run of a job; it resumes where the last run stopped.

    Args:
        job: the open job; its lock keeps other processes out.
        source: the rows.
        template: makes requests from records.
        tell: called with the name and the facts of each event: ``progress``, ``paused``, ``resumed``.
        stop: the run ends early once this is set; its answers are kept.
        endpoint: the only url that lines may use; None allows all.
        check_model: raises an error if the model was replaced during the run.
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
            CarryallError, OSError: the job failed; the answers so far are kept.
        """
        journal = self._job.journal
        journal.state_facts({"state": RUNNING})
        ids = CustomIds()
        writer = GroupWriter(journal, self._tell, self._stop, self._check)
        try:
            with contextlib.closing(writer), lasting_objects():
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
                f"the input has {self._rows} lines, but {answered} lines have answers: the input was "
                "changed. Restore it, or delete the answers with --restart"
            )
        else:
            finish(self._job, self._tell, self._stop)
        return journal.totals()

    def _check(self) -> None:
        self._check_model()
        self._poll()

    def _poll(self) -> None:
        """Stop if another process requested it."""
        if (self._job.paths.folder / CANCEL_FILE).exists():
            self._stop.set()

    def _lines(self, writer: GroupWriter, ids: CustomIds) -> Iterator[BatchLine]:
        """Yield the lines to run; skip lines that have answers; answer bad lines with their error."""
        for rows in _pieces(self._source, _READ_ROWS):
            done = self._job.journal.finished(rows[0].number, rows[-1].number)
            self._rows += len(rows)
            for row in rows:
                if self._stop.is_set():
                    return
                if row.number in done:
                    _skip_answered(row, done[row.number], ids)
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
    """Write the output of a job that has all answers, and mark it as finished.

    Raises:
        OSError: the output cannot be written.
    """
    job.journal.state_facts({"owns_output": True})
    while_full(lambda: export(job.journal, job.paths.output, job.paths.errors), tell, stop)
    job.journal.state_facts({"state": FINISHED, "completed_at": int(time.time())})


def _pieces(source: Source, max_rows: int) -> Iterator[list[SourceRow]]:
    piece: list[SourceRow] = []
    for row in source:
        piece.append(row)
        # A pipe may deliver slowly, so its lines run as they arrive.
        if len(piece) >= max_rows or not source.rereadable:
            yield piece
            piece = []
    if piece:
        yield piece


def _skip_answered(row: SourceRow, done: tuple[bytes, bytes | None], ids: CustomIds) -> None:
    digest, key = done
    if digest != row.digest:
        raise UsageError(
            f"line {row.number} of the input differs from the line that was answered: the input was changed. "
            "Restore it, or delete the answers with --restart"
        )
    if key is not None:
        ids.first_use(key, row.number)


def first_change(journal: Journal, source: Source) -> str:
    """Return a sentence on the answered lines of a changed input: how many changed, and the first."""
    changed, first, answered = 0, None, 0
    for rows in _pieces(source, _READ_ROWS):
        done = journal.finished(rows[0].number, rows[-1].number)
        for row in rows:
            if row.number in done:
                answered += 1
                if done[row.number][0] != row.digest:
                    changed, first = changed + 1, first or row.number
    if first is None:
        return f"the {answered} answered lines are unchanged"
    return f"{changed} of the answered lines changed; the first is line {first}"
