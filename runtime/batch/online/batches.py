"""A persistent queue of batches. A batch is a file of requests; batches run one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....errors import RequestError, UnknownObjectError, UsageError
from ...process.faults import fault_text, log_fault
from ..inputs.lines import parse_row
from ..inputs.sources import Source
from ..inputs.templates import PromptTemplate
from ..jobs.job import Job, JobPaths, open_job
from ..jobs.journal import Journal, Totals
from ..jobs.output import export
from ..jobs.writer import is_full
from ..run import BatchRun, Executor
from ..workers.offline import failed
from .batch import Batch, Json, read_batch
from .files import BATCH_OUTPUT, FileStore
from .records import Records

_log = logging.getLogger(__name__)

EXPIRED = "batch_expired"  # error code of the unanswered lines of an expired batch
_COMMIT_LINES = 1000
_RETRY_SECONDS = 2.0


class BatchQueue:
    """Runs batches one after the other, in its own thread.

    Answers are stored in the batch's journal, so that the next ``start`` resumes after a crash.

    Args:
        folder: the folder of the batches.
        files: the store of input and output files.
        open_executor: returns the executor that answers the lines of a batch.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: Path, files: FileStore, open_executor: Callable[[Batch], Executor]) -> None:
        self._records = Records(folder / "batches", lambda data: Batch(**data), "batch")
        self._files = files
        self._open_executor = open_executor
        self._news = threading.Condition()
        self._closing = False
        self._running: tuple[str, threading.Event] | None = None  # guarded by _news
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="carryall-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; answers are kept, and the next ``start`` resumes."""
        with self._news:
            self._closing = True
            if self._running is not None:
                self._running[1].set()
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def create(self, body: Mapping[str, Any], owner: str | None, models: tuple[str, ...] = ()) -> Json:
        """Add a batch to the queue, and return its object.

        Args:
            body: the body of the request.
            owner: the name of the caller's API key; None without API keys.
            models: the models that the owner may use; empty allows all.

        Raises:
            RequestError: a field of the body is invalid.
            UnknownObjectError: the owner has no such file.
        """
        batch = read_batch(body, owner, created=self._records.moment(), models=models)
        self._files.content(batch.input_file_id, owner)
        with self._news:
            self._records.put(batch)
            self._news.notify_all()
        return batch.to_json()

    def get(self, name: str, owner: str | None) -> Json:
        """Return a batch object.

        Raises:
            UnknownObjectError: there is no batch of this id.
        """
        return self._records.get(name, owner).to_json()

    def page(
        self, owner: str | None, *, after: str | None = None, limit: int = 20
    ) -> tuple[list[Json], bool]:
        """Return a page of the owner's batches, newest first, and whether there are more."""
        found, more = self._records.page(owner, after=after, limit=limit)
        return [batch.to_json() for batch in found], more

    def cancel(self, name: str, owner: str | None) -> Json:
        """Cancel a batch; the answers so far become its output.

        Raises:
            UnknownObjectError: there is no batch of this id.
            RequestError: the batch has ended.
        """
        with self._news:
            batch = self._records.get(name, owner)
            if batch.status == "cancelling":
                return batch.to_json()
            if batch.status not in ("validating", "in_progress"):
                raise RequestError(f"a batch that is {batch.status} cannot be cancelled")
            batch = self._change(batch, "cancelling")
            if self._running is not None and self._running[0] == name:
                self._running[1].set()
            self._news.notify_all()
        return batch.to_json()

    # The methods below run in the queue's thread.

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            stop = threading.Event()
            with self._news:
                self._running = batch.id, stop
                if self._closing or batch.status == "cancelling":
                    stop.set()
            late = threading.Timer(max(0.0, batch.expires_at - time.time()), stop.set)
            late.daemon = True
            late.start()
            try:
                self._run(batch, stop)
            except BaseException as error:  # noqa: BLE001 -- the service and the next batch must go on
                self._end_by(batch, error)
            finally:
                late.cancel()
                with self._news:
                    self._running = None

    def _next(self) -> Batch | None:
        """Wait for work, and return the oldest unfinished batch; None when the queue stops."""
        with self._news:
            while not self._closing:
                waiting = next((batch for batch in self._records.all() if batch.open), None)
                if waiting is not None:
                    return waiting
                self._news.wait()
        return None

    def _run(self, batch: Batch, stop: threading.Event) -> None:
        try:
            path = str(self._files.content(batch.input_file_id, batch.owner))
            source = Source([path])
            content = source.content()
        except UnknownObjectError as error:
            self._fail(batch.id, "invalid_file", str(error))
            return
        except UsageError as error:
            self._fail(batch.id, "invalid_file", str(error).replace(path, batch.input_file_id))
            return
        if not content.rows:
            self._fail(batch.id, "empty_file", "the input file has no lines")
            return
        with self._opened(batch, dataclasses.asdict(content)) as job:
            self._note(self._find(batch.id), job.journal.totals(), content.rows)
            self._progress(batch.id)
            run = BatchRun(
                job,
                source,
                PromptTemplate(),
                tell=lambda event, facts: self._tell(batch.id, event, facts, content.rows),
                stop=stop,
                endpoint=batch.endpoint,
            )
            with contextlib.closing(self._open_executor(batch)) as executor:
                run.run(executor)
            self._end(batch, job, source, content.rows)

    @contextlib.contextmanager
    def _opened(self, batch: Batch, content: Json) -> Iterator[Job]:
        folder = self._records.folder(batch.id)
        paths = JobPaths(
            str(folder / "output.jsonl"), str(folder / "output.errors.jsonl"), folder / "output.jsonl.job"
        )
        with open_job(paths, {"input": content}, {}, restart=False) as job:
            yield job

    def _end(self, batch: Batch, job: Job, source: Source, rows: int) -> None:
        """Publish the output of a batch that ended; do nothing if it was only interrupted by a shutdown."""
        now = dataclasses.replace(self._find(batch.id), model=job.journal.fact("model"))
        if job.finished:
            final = "expired" if EXPIRED in job.journal.totals().errors else "completed"
        elif now.status == "cancelling":
            final = "cancelled"
        elif time.time() >= batch.expires_at:
            final = "expired"
            _answer_expired(job.journal, source, batch.endpoint)
        else:
            return
        if final != "cancelled":
            now = self._change(now, "finalizing")
        if final != "completed":
            export(job.journal, job.paths.output, job.paths.errors)
        self._note(now, job.journal.totals(), rows)
        outputs = {
            "output_file_id": self._publish(batch, job.paths.output, "output"),
            "error_file_id": self._publish(batch, job.paths.errors, "error"),
        }
        self._change(now, final, **outputs)
        shutil.rmtree(job.paths.folder, ignore_errors=True)

    def _publish(self, batch: Batch, path: str, kind: str) -> str | None:
        """Move an output to the file store, and return its file id. After a crash, the id is the same."""
        name = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        if not Path(path).exists() or not Path(path).stat().st_size:
            with contextlib.suppress(UnknownObjectError):
                return self._files.get(name, batch.owner).id
            return None
        return self._files.add(
            Path(path),
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=BATCH_OUTPUT,
            owner=batch.owner,
            name=name,
            expires_after=batch.output_expires_after,
        ).id

    def _progress(self, name: str) -> None:
        with self._news:
            batch = self._find(name)
            if batch.status == "validating":
                self._change(batch, "in_progress")

    def _tell(self, name: str, event: str, facts: Json, rows: int) -> None:
        if event == "progress":
            self._note(self._find(name), facts["totals"], rows)
        elif event == "paused":
            _log.warning("batch %s is paused: %s", name, facts["reason"])

    def _note(self, batch: Batch, totals: Totals, rows: int) -> None:
        """Copy the totals of a journal to the batch, in memory only: the journal stores them."""
        batch.counts = {"total": rows, "completed": totals.completed, "failed": totals.failed}
        batch.tokens = [totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens]

    def _end_by(self, batch: Batch, error: BaseException) -> None:
        """Let a batch fail; while the disk is full, wait, since the batch is run again then."""
        log_fault(_log, batch.id, "the batch", error)
        if not (isinstance(error, OSError) and is_full(error)):
            try:
                self._fail(batch.id, "server_error", fault_text("the batch", error))
            except OSError as failed:
                log_fault(_log, batch.id, "storing its state", failed)
            else:
                return
        with self._news:
            self._news.wait_for(lambda: self._closing, _RETRY_SECONDS)

    def _fail(self, name: str, code: str, message: str) -> None:
        with self._news:
            error = {"code": code, "message": message, "param": None, "line": None}
            self._change(self._find(name), "failed", errors=[error])

    def _find(self, name: str) -> Batch:
        return next(batch for batch in self._records.all() if batch.id == name)

    def _change(self, batch: Batch, status: str, **fields: Any) -> Batch:
        """Store a new status and its time."""
        with self._news:
            times = {**batch.times, f"{status}_at": int(time.time())}
            changed = dataclasses.replace(batch, status=status, times=times, **fields)
            self._records.put(changed)
        return changed


def _answer_expired(journal: Journal, source: Source, endpoint: str) -> None:
    """Add an error for each line without an answer."""
    answers = []
    for row in source:
        if row.number in journal.finished(row.number, row.number):
            continue
        line: Any = parse_row(row, PromptTemplate(), endpoint)
        message = "the batch expired before this line was answered"
        answers.append(failed(line, EXPIRED, message))
        if len(answers) >= _COMMIT_LINES:
            journal.commit(answers)
            answers = []
    if answers:
        journal.commit(answers)
