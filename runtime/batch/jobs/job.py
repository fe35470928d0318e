"""The folder of a job: its journal, its lock, and the check that a resumed job is the same job."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from ....errors import OutputExistsError, UsageError
from ....records import dataclass
from ....storage.paths import check_name
from ....storage.writing import writing
from ..inputs.files import check_folder, exists, is_remote, plain_suffix, with_infix
from .journal import JOURNAL_FILE, Journal
from .writer import is_full

LOCK_FILE, OWNER_FILE, CANCEL_FILE = "lock", "owner.json", "cancel"
INPUT_FILE = "input.jsonl"  # requests that were given as objects
NEW, RUNNING, FINISHED, CANCELLED = "new", "running", "finished", "cancelled"

_LOCK_SECONDS = 0.5  # a status query holds the lock for a moment

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP)

Facts = dict[str, Any]


class JobChangedError(UsageError):
    """The folder holds a job of another input, model or options."""


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The files and the folder of a job.

    Args:
        output: file or URL of the results.
        errors: file or URL of the errors.
        folder: the local folder of the journal.
    """

    output: str
    errors: str
    folder: Path

    @classmethod
    def of(cls, output: str, errors: str | None = None, folder: str | Path | None = None) -> JobPaths:
        """Return the paths of an output.

        The default folder is ``OUTPUT.job``; the default errors file is ``results.errors.jsonl`` for
        ``results.jsonl``.

        Raises:
            UsageError: the output is remote, and no folder is given.
        """
        if folder is None and is_remote(output):
            raise UsageError(f"{output} is remote; name a local folder for the job's journal with --job DIR")
        suffix = ".jsonl" if plain_suffix(output) == ".parquet" else None
        own = with_infix(output, "errors", suffix)
        return cls(output, errors or own, Path(folder if folder is not None else f"{output}.job"))


def find_folder(name: str | Path) -> Path:
    """Return the job folder of a name, which is the folder itself or the job's output.

    Raises:
        UsageError: there is no such job folder.
    """
    check_name(Path(name))
    for path in (Path(name), Path(f"{name}.job")):
        if (path / JOURNAL_FILE).is_file():
            return path
    raise UsageError(f"{name} is neither a job folder nor the output of a job: there is no {name}.job")


@dataclass(slots=True)
class Job:
    """An open job, locked by this process; see ``open_job``."""

    paths: JobPaths
    journal: Journal

    @property
    def finished(self) -> bool:
        """Whether every line has its answer, and the output is written."""
        return bool(self.journal.fact("state") == FINISHED)


@contextlib.contextmanager
def open_job(paths: JobPaths, facts: Facts, details: Facts, *, restart: bool) -> Iterator[Job]:
    """Create or resume a job, and lock it against other processes.

    Args:
        paths: the paths of the job.
        facts: everything that its answers depend on, as nested JSON objects: input, model, options.
        details: other values to store; they may change between runs.
        restart: delete the stored job first.

    Raises:
        JobChangedError: the folder holds a job with other facts; the message lists the differences.
        OutputExistsError: the output exists, and the journal does not record that this job wrote it.
        UsageError: the folder cannot be created, or another process works on the job or its output.
        OSError: the disk is full.
    """
    check_folder(paths.output)
    check_folder(paths.errors)
    if not restart and not (paths.folder / JOURNAL_FILE).exists():
        _refuse_foreign_output(paths)  # before the folder is made
    try:
        paths.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error):
            raise  # callers that wait for room know it by its number
        raise UsageError(f"the job folder {paths.folder} cannot be created: {error.strerror}") from error
    with _locked(paths), _nothing_left_without_answers(paths.folder):
        if restart:
            _forget(paths.folder)
        if not restart and not (paths.folder / JOURNAL_FILE).exists():
            _refuse_foreign_output(paths)
        journal = Journal(paths.folder)
        try:
            if restart:
                journal.state_facts({"owns_output": True})
            elif not journal.fact("owns_output"):
                _refuse_foreign_output(paths)
            before = journal.fact("job")
            if before is None:
                created = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
                journal.state_facts({"job": facts, "created": created, "state": NEW})
            elif changes := differences(before, facts):
                raise JobChangedError(_refusal(paths, changes))
            journal.state_facts({"details": details})
            (paths.folder / CANCEL_FILE).unlink(missing_ok=True)
            yield Job(paths, journal)
        finally:
            journal.close()


@contextlib.contextmanager
def _nothing_left_without_answers(folder: Path) -> Iterator[None]:
    """Delete what a new job wrote, if it is refused or fails before its first answer."""
    new = not (folder / JOURNAL_FILE).exists()
    try:
        yield
    except BaseException:
        if new and not _has_answers(folder):
            own = (INPUT_FILE, OWNER_FILE, LOCK_FILE, JOURNAL_FILE)
            for name in (*own, f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm"):
                with contextlib.suppress(OSError):  # Windows keeps the lock's file while it is held
                    (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _has_answers(folder: Path) -> bool:
    if not (folder / JOURNAL_FILE).exists():
        return False
    try:
        with contextlib.closing(Journal(folder, read_only=True)) as journal:
            return journal.totals().answered > 0
    except UsageError:  # its tables could not be created
        return False
    except OSError:  # unknown: keep them
        return True


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line for each fact that differs, such as ``options.max_tokens: 6 -> 8``."""
    flat_before, flat_after = dict(_flat(before)), dict(_flat(after))
    names = dict.fromkeys([*flat_before, *flat_after])
    return [
        f"{name}: {_shown(flat_before.get(name))} -> {_shown(flat_after.get(name))}"
        for name in names
        if flat_before.get(name) != flat_after.get(name)
    ]


def is_running(folder: Path) -> bool:
    """Return whether a process works on the job."""
    if not (folder / LOCK_FILE).exists():
        return False
    lock = filelock.FileLock(folder / LOCK_FILE)
    try:
        with lock.acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True


def owner(folder: Path) -> Facts:
    """Return pid, host and start time of the process that works, or last worked, on the job."""
    try:
        found = json.loads((folder / OWNER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "none" if value is None else text if len(text) <= 80 else f"{text[:77]}..."


def _refusal(paths: JobPaths, changes: list[str]) -> str:
    return (
        f"{paths.folder} holds another job: {'; '.join(changes)}. Restore the old values, write to another "
        "output, or delete its answers with --restart"
    )


def _refuse_foreign_output(paths: JobPaths) -> None:
    for name in (paths.output, paths.errors):
        if exists(name):
            raise OutputExistsError(
                f"{name} exists, and no job in {paths.folder} wrote it; --restart replaces it"
            )


def _forget(folder: Path) -> None:
    for path in folder.glob(f"{JOURNAL_FILE}*"):
        path.unlink()


@contextlib.contextmanager
def _locked(paths: JobPaths) -> Iterator[None]:
    """Hold the locks of the folder and of the output. The system frees them if the process dies."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_lock(paths.folder, f"the job {paths.folder}"))
        usual = Path(f"{paths.output}.job")
        if not is_remote(paths.output) and usual.absolute() != paths.folder.absolute():
            # A job in another folder may have the same output as the job in the default folder.
            usual.mkdir(exist_ok=True)
            stack.enter_context(_one_lock(usual, f"the output {paths.output}"))
            stack.enter_context(_nothing_left_without_answers(usual))
        yield


@contextlib.contextmanager
def _one_lock(folder: Path, what: str) -> Iterator[None]:
    lock = filelock.FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=_LOCK_SECONDS, poll_interval=0.05)
    except filelock.Timeout:
        who = owner(folder)
        by = f" (process {who.get('pid')} on {who.get('host')})" if who else ""
        raise UsageError(f"another process{by} works on {what}; wait for it, or cancel it") from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _WITHOUT_LOCKS:
            error.filename = error.filename or str(folder / LOCK_FILE)
            raise  # such as a full disk, for which a batch of the service waits
        raise UsageError(f"{what} cannot be locked by its file system; choose a folder on another") from error
    try:
        mine = {"pid": os.getpid(), "host": platform.node(), "since": time.time()}
        with writing(folder / OWNER_FILE):
            (folder / OWNER_FILE).write_text(json.dumps(mine), encoding="utf-8")
        yield
    finally:
        lock.release()
