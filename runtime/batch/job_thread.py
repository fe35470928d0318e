"""Jobs that run in a thread of this process."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...options import shown
from ...storage.scratch import scratch_folder
from ..types.arguments import checked_arguments
from .execute import OpenExecutor, Outcome, execute
from .execute import retry_failed as drop_failed
from .inputs.files import replacing
from .jobs.job import INPUT_FILE, JobPaths
from .jobs.journal import Journal, Totals
from .jobs.status import job_status
from .spec import BatchSpec

_PIECE = 256
_POLL_SECONDS = 0.2

Record = dict[str, Any]


class BatchJob:
    """A job that runs in a thread of this process. ``run`` creates it.

    Iterating yields the output records, failed ones included, as they are committed. Records of earlier runs
    come first. The job runs whether or not anything iterates.

    Args:
        spec: the job.
        restart: see ``execute``.
        open_executor: see ``execute``.
        cleanup: closed when the job is closed.
    """

    def __init__(
        self,
        spec: BatchSpec,
        *,
        restart: bool = False,
        open_executor: OpenExecutor | None = None,
        cleanup: contextlib.ExitStack | None = None,
    ) -> None:
        self.spec = spec
        self.folder = spec.paths.folder
        self._cleanup = cleanup or contextlib.ExitStack()
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._news = threading.Event()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, args=(restart, open_executor), name="carryall-batch-job", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until the job is finished or stopped; return its outcome.

        Args:
            timeout: the longest wait in seconds; None waits without a limit.

        Raises:
            TimeoutError: the job still runs.
            CarryallError, OSError: the job failed with this error.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the job {self.folder} still runs")
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise RuntimeError("the job's thread ended without an outcome")
        return self._outcome

    def stop(self) -> None:
        """Ask the job to stop and return at once. Its answers are kept; ``wait`` waits for the end."""
        self._stop.set()

    def status(self) -> Record:
        """Return the state of the job as an OpenAI batch object; see ``job_status``."""
        self._begun.wait()
        if self._error is not None and not self.folder.exists():
            raise self._error
        return job_status(str(self.folder))

    @property
    def totals(self) -> Totals:
        """The sums over the answers so far."""
        with self._journal() as journal:
            return journal.totals()

    def results(self) -> Iterator[Record]:
        """Wait for the job, then yield the records of the lines that succeeded, in the order of the input.

        Raises:
            CarryallError, OSError: the job failed with this error.
        """
        self.wait()
        with self._journal() as journal:
            for answer in journal.answers("code IS NULL"):
                yield json.loads(answer.line)

    def __iter__(self) -> Iterator[Record]:
        """Yield records as they are committed.

        Raises:
            CarryallError, OSError: the job failed with this error.
        """
        self._begun.wait()
        if self._outcome is None and self._error is not None:
            raise self._error
        turn = 0
        with self._journal() as journal:
            while True:
                ended = not self._thread.is_alive()
                self._news.clear()
                while found := journal.since(turn, _PIECE):
                    for turn, answer in found:  # noqa: B007 -- the last one counts
                        yield json.loads(answer.line)
                if ended:
                    break
                self._news.wait(_POLL_SECONDS)
        self.wait()

    def close(self) -> None:
        """Stop the job, wait for it, and delete its files if they are temporary."""
        self.stop()
        self._thread.join()
        self._cleanup.close()

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _journal(self) -> contextlib.closing[Journal]:
        return contextlib.closing(Journal(self.folder, read_only=True))

    def _work(self, restart: bool, open_executor: OpenExecutor | None) -> None:
        try:
            self._outcome = execute(
                self.spec, restart=restart, tell=self._tell, stop=self._stop, open_executor=open_executor
            )
        except BaseException as error:  # noqa: BLE001 -- raised again by `wait`
            self._error = error
        finally:
            self._begun.set()
            self._news.set()

    def _tell(self, event: str, facts: dict[str, Any]) -> None:
        self._begun.set()
        self._news.set()


@checked_arguments
def run(
    source: str | Path | Iterable[str | Path | Mapping[str, Any]],
    output: str | Path | None = None,
    *,
    model: str | Path,
    restart: bool = False,
    open_executor: OpenExecutor | None = None,
    **options: Any,
) -> BatchJob:
    """Start or resume a job in a thread.

    Args:
        source: a file, glob or URL, a list of these, or requests (mappings with the fields of a JSON line).
        output: file or URL of the results; None keeps them in a temporary folder until the job is closed.
        model: as for ``load_model``.
        restart: delete existing answers first.
        open_executor: see ``execute``.
        **options: the other fields of ``BatchSpec``.

    Raises:
        UsageError: an option is wrong. The methods of the job raise errors that are found later.
    """
    stack = contextlib.ExitStack()
    try:
        if output is None:
            folder = stack.enter_context(scratch_folder())
            output = folder / "results.jsonl"
        paths = JobPaths.of(str(output), options.get("errors"), options.get("job"))
        names, requests = _inputs(source, paths.folder)
        try:
            spec = BatchSpec(inputs=names, output=str(output), model=str(model), **options)
        except TypeError as error:
            raise UsageError(f"carryall.batch.run: {error}") from error
        if requests is not None:
            _write_requests(requests, Path(names[0]))
    except BaseException:
        stack.close()
        raise
    return BatchJob(spec, restart=restart, open_executor=open_executor, cleanup=stack)


@checked_arguments
def retry_failed(job: str | Path) -> BatchJob:
    """Answer the failed lines of a job again.

    Args:
        job: the folder or the output of the job.

    Raises:
        UsageError: the job does not exist, or a process works on it.
    """
    spec, _ = drop_failed(str(job))
    return BatchJob(spec)


def _inputs(
    source: str | Path | Iterable[str | Path | Mapping[str, Any]], folder: Path
) -> tuple[Sequence[str], Iterable[Any] | None]:
    """Return the names of the input files, and the requests to write to the file in ``folder``, if given."""
    if isinstance(source, str | Path):
        return [str(source)], None
    items = iter(source)
    first = next(items, None)
    if first is None or isinstance(first, Mapping):
        return [str(folder / INPUT_FILE)], itertools.chain([] if first is None else [first], items)
    return [str(first), *map(str, items)], None


def _write_requests(requests: Iterable[Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(str(path)) as stream:
        for number, request in enumerate(requests, start=1):
            if not isinstance(request, Mapping):
                raise UsageError(f"request {number} must be a mapping, not {shown(request)}")
            stream.write(json.dumps(request, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: NumPy scalars become Python numbers, others strings."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
