"""The record of a job on disk: what it is, and the answer of every line that has one.

SQLite commits are atomic: after a crash at any instant the journal holds the answers of all earlier commits.
Each line has one answer at most, because its number is unique.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ....errors import UsageError

JOURNAL_FILE = "journal.sqlite3"
FORMAT_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    turn INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL UNIQUE,
    digest BLOB NOT NULL,
    id_key BLOB,
    record BLOB NOT NULL,
    extra TEXT,
    code TEXT,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    finish_reason TEXT,
    worker TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS failures ON answers (number) WHERE code IS NOT NULL;
"""
_COLUMNS = (
    "number, digest, id_key, record, extra, code, prompt_tokens, completion_tokens, cached_tokens, seconds, "
    "finish_reason, worker"
)
_INSERT = f"INSERT INTO answers ({_COLUMNS}) VALUES ({', '.join('?' * 12)})"  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one line.

    Args:
        number: the line's, from 1.
        digest: of the line's content.
        id_key: digest of its custom_id, if it states one.
        record: the line of output, JSON without the line break.
        extra: columns of the input kept for the output, as JSON.
        code: of the error; None if the line succeeded.
        seconds: from the line's first step to its last.
        worker: which worker computed it.
    """

    number: int
    digest: bytes
    id_key: bytes | None = None
    record: bytes = b""
    extra: str | None = None
    code: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    finish_reason: str | None = None
    worker: str = ""


@dataclass(slots=True)
class Totals:
    """Sums over the answers of a job."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # how many of each code

    @property
    def answered(self) -> int:
        """Lines that have an answer."""
        return self.completed + self.failed

    def add(self, answer: Answer) -> None:
        """Count one more answer."""
        if answer.code is None:
            self.completed += 1
        else:
            self.failed += 1
            self.errors[answer.code] = self.errors.get(answer.code, 0) + 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.cached_tokens += answer.cached_tokens


class Journal:
    """A job's answers and facts. Thread-safe.

    Args:
        folder: the job's; the journal is made if there is none.
        read_only: fail where there is none, and never write.

    Raises:
        UsageError: the folder holds no journal, or one of another version.
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.path = folder / JOURNAL_FILE
        if read_only and not self.path.is_file():
            raise UsageError(f"{folder} is no job folder: it has no {JOURNAL_FILE}")
        self._lock = threading.RLock()
        with _as_os_errors(self.path):
            # Transactions are stated where they begin and end, so the module opens none of its own.
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")  # readers do not hold up the job
                self._db.execute("PRAGMA synchronous = FULL")  # every commit is on the disk
                self._db.executescript(_SCHEMA)
        try:
            self._check_version(write=not read_only)
        except BaseException:
            self._db.close()
            raise

    def _check_version(self, *, write: bool) -> None:
        version = self.fact("format_version")
        if version is None and write:
            self.state_facts({"format_version": FORMAT_VERSION})
        elif version != FORMAT_VERSION:
            raise UsageError(
                f"{self.path} has format {version}, this version of carryall reads {FORMAT_VERSION}; "
                "--restart begins anew"
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def fact(self, name: str) -> Any:
        """What was stated about the job under this name, or None."""
        with self._lock, _as_os_errors(self.path):
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else json.loads(found[0])

    def state_facts(self, facts: Mapping[str, Any]) -> None:
        """State facts about the job, replacing those of the same names."""
        with self._transaction():
            self._put(facts)

    def commit(self, answers: Sequence[Answer]) -> None:
        """Add answers and their sums, all of them or none; they are on the disk when this returns.

        Raises:
            OSError: the disk is full, or failed. ENOSPC says the former.
        """
        totals = self.totals()
        for answer in answers:
            totals.add(answer)
        with self._transaction():
            self._db.executemany(_INSERT, [_values(answer) for answer in answers])
            self._put({"totals": asdict(totals), "updated": time.time()})

    def totals(self) -> Totals:
        """Sums over all answers."""
        return Totals(**(self.fact("totals") or {}))

    def finished(self, first: int, last: int) -> dict[int, tuple[bytes, bytes | None]]:
        """Content digest and custom_id key of each answered line from ``first`` to ``last``."""
        query = "SELECT number, digest, id_key FROM answers WHERE number BETWEEN ? AND ?"
        with self._lock, _as_os_errors(self.path):
            found = self._db.execute(query, (first, last)).fetchall()
        return {number: (digest, id_key) for number, digest, id_key in found}

    def answers(self, condition: str = "1", values: Sequence[Any] = ()) -> Iterator[Answer]:
        """All answers in the order of lines, or those for which an SQL condition holds.

        They are read on a connection of their own, so that others may go on meanwhile.
        """
        query = f"SELECT {_COLUMNS} FROM answers WHERE {condition} ORDER BY number"  # noqa: S608 -- our own
        for row in self.query(query, values):
            yield _answer(row)

    def since(self, turn: int, most: int) -> list[tuple[int, Answer]]:
        """Up to ``most`` answers committed after that of ``turn``, each with its own, in this order."""
        query = f"SELECT turn, {_COLUMNS} FROM answers WHERE turn > ? ORDER BY turn LIMIT ?"  # noqa: S608
        return [(row[0], _answer(row[1:])) for row in self.query(query, (turn, most))]

    def query(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows of an SQL query, read on a connection of its own."""
        with _as_os_errors(self.path):
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
            try:
                yield from database.execute(query, values)
            finally:
                database.close()

    def drop_failed(self) -> int:
        """Remove the answers of failed lines, which are then to be done again; return how many."""
        totals = self.totals()
        sums = self._db.execute(
            "SELECT coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), "
            "coalesce(sum(cached_tokens), 0) FROM answers WHERE code IS NOT NULL"
        ).fetchone()
        failed, totals.failed, totals.errors = totals.failed, 0, {}
        totals.prompt_tokens -= sums[0]
        totals.completion_tokens -= sums[1]
        totals.cached_tokens -= sums[2]
        with self._transaction():
            self._db.execute("DELETE FROM answers WHERE code IS NOT NULL")
            self._put({"totals": asdict(totals), "state": "new"})
        return failed

    def _put(self, facts: Mapping[str, Any]) -> None:
        rows = [(name, json.dumps(value)) for name, value in facts.items()]  # ASCII: a path may be no UTF-8
        self._db.executemany("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, _as_os_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise


def _values(answer: Answer) -> tuple[Any, ...]:
    return (
        answer.number, answer.digest, answer.id_key, answer.record, answer.extra, answer.code,
        answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens, answer.seconds,
        answer.finish_reason, answer.worker,
    )  # fmt: skip


def _answer(row: tuple[Any, ...]) -> Answer:
    (number, digest, id_key, record, extra, code, prompt, completion, cached, seconds, reason, worker) = row
    return Answer(
        number=number, digest=digest, id_key=id_key, record=record, extra=extra, code=code,
        prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, seconds=seconds,
        finish_reason=reason, worker=worker,
    )  # fmt: skip


@contextmanager
def _as_os_errors(path: Path) -> Iterator[None]:
    """Raise what SQLite reports of the disk as the operating system would."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(number, str(error), str(path)) from error
