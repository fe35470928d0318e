"""Run a batch job from its specification to its output files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import PackageError, UsageError
from ...progress import Progress
from ...records import dataclass
from ..models.loading import check_available
from .identity import model_identity, model_stamp
from .inputs.files import check_folder, exists, is_remote
from .inputs.sources import Content, Source
from .jobs.job import Job, JobChangedError, find_folder, open_job
from .jobs.journal import Journal, Totals
from .jobs.writer import Tell
from .run import BatchRun, Executor, finish, first_change
from .spec import BatchSpec
from .workers.cluster import cluster_pool
from .workers.pool import PIECE_LINES, WorkerPool
from .workers.processes import ProcessWorker, end_if_worker
from .workers.worker import WorkerSpec, open_worker

OpenExecutor = Callable[[BatchSpec, str, int, Progress | None], Executor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of a job.

    Args:
        totals: sums over all runs of the job.
        answered_before: number of lines that were answered before this run.
        finished: whether every line is answered and the output is written. False: the job was stopped.
        folder: the folder of the job.
    """

    totals: Totals
    answered_before: int
    finished: bool
    folder: Path


def execute(
    spec: BatchSpec,
    *,
    restart: bool = False,
    tell: Tell = lambda event, facts: None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
    open_executor: OpenExecutor | None = None,
) -> Outcome:
    """Run a job, or the rest of it.

    Args:
        spec: the job.
        restart: delete the answers in the job's folder first, also those of another job.
        tell: called with the name and the facts of each event: ``start``, ``loaded``, ``progress``,
            ``paused`` and ``resumed``.
        stop: the run ends early once this is set.
        progress: called for every tensor that is written while the model is prepared.
        open_executor: returns the executor that answers the lines. Its arguments are the job, the model's
            name, the creation time and ``progress``.

    Raises:
        JobChangedError: the folder holds the answers of another input, model or options.
        UsageError: the job cannot run with these options; nothing was written.
        CarryallError, OSError: the job failed; the answers so far are kept.
    """
    end_if_worker()
    execution = _Execution(
        spec, tell, stop or threading.Event(), progress, open_executor or make_executor, spec.source()
    )
    return execution.run(restart=restart)


@dataclass(frozen=True, slots=True)
class _Execution:
    """One run of a job; see ``execute``."""

    spec: BatchSpec
    tell: Tell
    stop: threading.Event
    progress: Progress | None
    open_executor: OpenExecutor
    source: Source

    def run(self, *, restart: bool) -> Outcome:
        """Open the job, run it, and close it."""
        spec = self.spec
        check_folder(spec.paths.output)
        check_folder(spec.paths.errors)
        _refuse_output_as_input(spec, self.source)
        content = self.source.content() if self.source.rereadable else None
        stamp = model_stamp(spec.model)  # first, so that later changes of the files are seen
        identity = _identity(spec, self.progress)
        watch = ModelWatch(spec, identity, stamp)
        facts = spec.facts(content, identity)
        try:
            with open_job(spec.paths, facts, spec.details(), restart=restart) as job:
                rows = None if content is None else content.rows
                return self._go_on(job, rows, watch)
        except JobChangedError as error:
            raise JobChangedError(_explained(error, spec, self.source, content)) from None

    def _go_on(self, job: Job, rows: int | None, watch: ModelWatch) -> Outcome:
        before = job.journal.totals()
        folder = job.paths.folder
        self.tell("start", {"rows": rows, "folder": str(folder), "totals": before})
        job.journal.state_facts({"rows": rows})
        if rows is not None and before.answered == rows:
            if not (job.finished and exists(job.paths.output)):
                finish(job, self.tell, self.stop)
            return Outcome(before, before.answered, True, folder)
        totals = self._answer(job, watch)
        return Outcome(totals, before.answered, job.finished, folder)

    def _answer(self, job: Job, watch: ModelWatch) -> Totals:
        """Answer the lines that have no answer; return the sums over all runs."""
        if job.journal.fact("label") is None:
            job.journal.state_facts({"label": self.spec.model})
        label, created = str(job.journal.fact("label")), int(job.journal.fact("created"))
        executor = self.open_executor(self.spec, label, created, self.progress)
        self.tell("loaded", {})
        with contextlib.closing(executor):
            run = BatchRun(
                job,
                self.source,
                self.spec.prompt_template(),
                tell=self.tell,
                stop=self.stop,
                endpoint=self.spec.endpoint,
                check_model=watch.check,
            )
            return run.run(executor)


def make_executor(spec: BatchSpec, label: str, created: int, progress: Progress | None = None) -> Executor:
    """Open the executor of a job: an engine in this process, worker processes, or a Ray cluster."""
    worker = spec.worker(label, created)
    if spec.ray is not None:
        if spec.providers:
            raise UsageError(
                "--worker cannot be used with --ray; use --provider for workers on a Ray cluster"
            )
        return cluster_pool(worker, spec.ray, spec.ray_workers, spec.ray_resources)
    if not spec.providers:
        return open_worker(worker, progress)
    for provider in spec.providers:
        check_available(provider)  # a worker process takes seconds to say so
    workers = [worker_on(worker, provider, name) for provider, name in numbered(spec.providers)]
    openers = [functools.partial(ProcessWorker, each) for each in workers]
    return WorkerPool(openers, probes=len(set(spec.providers)) > 1)


def numbered(providers: Sequence[str]) -> list[tuple[str, str]]:
    """Return each provider with a unique name of its worker: ``cpu``, ``cpu#2``."""
    counts: dict[str, int] = {}
    pairs = []
    for provider in providers:
        counts[provider] = counts.get(provider, 0) + 1
        number = counts[provider]
        pairs.append((provider, provider if number == 1 else f"{provider}#{number}"))
    return pairs


def worker_on(worker: WorkerSpec, provider: str, name: str) -> WorkerSpec:
    """Return the worker on another provider, with a short read-ahead so that free workers get lines."""
    loading = {**worker.loading, "provider": provider}
    return dataclasses.replace(worker, loading=loading, worker=name, window=2 * PIECE_LINES)


def _identity(spec: BatchSpec, progress: Progress | None = None) -> dict[str, str]:
    """Return the identity of a job's model and adapters."""
    given = spec.loading
    return model_identity(
        spec.model,
        quantize=given.get("quantize"),
        rope_scaling=given.get("rope_scaling"),
        loras=given.get("loras"),
        progress=progress,
    )


class ModelWatch:
    """Detects that a model's files were replaced.

    Args:
        spec: the job, which names the model.
        identity: the identity of the model when the job began.
        stamp: the stamp of its files at that time.
    """

    def __init__(self, spec: BatchSpec, identity: dict[str, str], stamp: object) -> None:
        self._spec = spec
        self._identity = identity
        self._stamp = stamp

    def check(self) -> None:
        """Compare the sizes and times of the files; where these changed, compare the identity.

        Raises:
            PackageError: the model was replaced or deleted.
        """
        try:
            stamp = model_stamp(self._spec.model)
        except OSError as error:
            raise PackageError(f"{self._spec.model} was deleted while the job ran: {error}") from error
        if stamp == self._stamp:
            return
        now = _identity(self._spec)
        if now != self._identity:
            raise PackageError(
                f"{self._spec.model} was replaced while the job ran; the answers so far come from the old "
                "model. Restore the old model to resume, or use --restart"
            )
        self._stamp = stamp


def _refuse_output_as_input(spec: BatchSpec, source: Source) -> None:
    for name in source.files:
        for target in (spec.paths.output, spec.paths.errors):
            same = name == target
            if not same and not is_remote(name) and not is_remote(target) and Path(name).is_file():
                same = Path(target).is_file() and os.path.samefile(name, target)
            if same:
                raise UsageError(f"{target} is the input; write the results elsewhere")


def _explained(error: JobChangedError, spec: BatchSpec, source: Source, content: Content | None) -> str:
    """Return the error's message, with the first changed line if the input changed."""
    if content is None:
        return str(error)
    journal = Journal(spec.paths.folder, read_only=True)
    try:
        before = (journal.fact("job") or {}).get("input", {})
        if before.get("sha256") == content.sha256:
            return str(error)
        return f"{error}. Input: {first_change(journal, source)}"
    finally:
        journal.close()


def retry_failed(folder_or_output: str) -> tuple[BatchSpec, int]:
    """Delete the answers of a job's failed lines; return the job, to be run again, and their number.

    Raises:
        UsageError: the job does not exist, or a process works on it.
    """
    folder = find_folder(folder_or_output)
    journal = Journal(folder, read_only=True)
    try:
        details, facts = journal.fact("details"), journal.fact("job")
    finally:
        journal.close()
    if not details or not facts:
        raise UsageError(f"{folder} holds no job: the job was stopped before it began; run it again")
    spec = BatchSpec.from_details({**details, "job": str(folder)})
    with open_job(spec.paths, facts, details, restart=False) as job:
        return spec, job.journal.drop_failed()
