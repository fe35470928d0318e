"""The journal of a job: a SQLite database of its facts and answers.

SQLite commits are atomic: after a crash the journal holds the answers of all earlier commits. A line has at
most one answer, because its number is a unique key.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....plain_json import plain_json
from ....records import dataclass

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
_NO_JOURNAL = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_INSERT = f"INSERT INTO answers ({_COLUMNS}) VALUES ({', '.join('?' * 12)})"  # noqa: S608 -- constants


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of one line.

    Args:
        number: the number of the line, from 1.
        digest: the digest of the line's content.
        id_key: the digest of its custom_id; None if it has none.
        record: the line of output, as JSON without the line break.
        extra: columns of the input that are copied to the output, as JSON with NaN and Infinity.
        code: the error code; None if the line succeeded.
        seconds: time from the line's first engine step to its last.
        worker: the name of the worker that computed it.
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

    @property
    def line(self) -> bytes:
        """The line of output, without the line break."""
        return output_line(self.record, self.extra)


def output_line(record: bytes, extra: str | None) -> bytes:
    """Return a record with the columns kept from the input, both as JSON; the columns are in ``columns``."""
    if extra is None:
        return record
    if "NaN" in extra or "Infinity" in extra:
        extra = plain_json(json.loads(extra))
    return record[:-1] + b', "columns": ' + extra.encode() + b"}"


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
        """The number of lines that have an answer."""
        return self.completed + self.failed

    def add(self, answer: LineResult) -> None:
        """Add one answer to the sums."""
        if answer.code is None:
            self.completed += 1
        else:
            self.failed += 1
            self.errors[answer.code] = self.errors.get(answer.code, 0) + 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.cached_tokens += answer.cached_tokens


class Journal:
    """The answers and facts of a job. Thread-safe.

    Args:
        folder: the folder of the job; a missing journal is created.
        read_only: never write, and fail if there is no journal.

    Raises:
        UsageError: the folder holds no journal and ``read_only`` is set, or the journal's format differs.
        OSError: the journal cannot be opened.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.path = folder / JOURNAL_FILE
        if read_only and not self.path.is_file():
            raise UsageError(f"{folder} is not a job folder: it has no {JOURNAL_FILE}")
        self._lock = threading.RLock()
        with _as_os_errors(self.path):
            # isolation_level=None: this class begins and ends its transactions itself.
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
            self._file = self.path.stat()
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")  # readers do not block the writer
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
                "start again with --restart"
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def fact(self, name: str) -> Any:
        """Return the stored fact of this name, or None."""
        with self._lock, _as_os_errors(self.path):
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else json.loads(found[0])

    def state_facts(self, facts: Mapping[str, Any]) -> None:
        """Store facts about the job; facts of the same names are replaced."""
        with self._transaction():
            self._put(facts)

    def commit(self, answers: Sequence[LineResult]) -> None:
        """Add answers and update the sums in one transaction, which is on the disk when this returns.

        Raises:
            UsageError: the file was removed or replaced.
            OSError: the disk is full (ENOSPC) or failed.
        """
        self._check_in_place()
        totals = self.totals()
        for answer in answers:
            totals.add(answer)
        with self._transaction():
            self._db.executemany(_INSERT, [_values(answer) for answer in answers])
            self._put({"totals": asdict(totals), "updated": time.time()})

    def totals(self) -> Totals:
        """Return the sums over all answers."""
        return Totals(**(self.fact("totals") or {}))

    def finished(self, first: int, last: int) -> dict[int, tuple[bytes, bytes | None]]:
        """Return content digest and custom_id key of each answered line from ``first`` to ``last``."""
        query = "SELECT number, digest, id_key FROM answers WHERE number BETWEEN ? AND ?"
        with self._lock, _as_os_errors(self.path):
            found = self._db.execute(query, (first, last)).fetchall()
        return {number: (digest, id_key) for number, digest, id_key in found}

    def answers(self, condition: str = "1", values: Sequence[Any] = ()) -> Iterator[LineResult]:
        """Yield the answers that meet an SQL condition, in the order of their lines.

        They are read on a separate connection, so that the job can write at the same time.
        """
        query = f"SELECT {_COLUMNS} FROM answers WHERE {condition} ORDER BY number"  # noqa: S608 -- our own
        for row in self.query(query, values):
            yield _answer(row)

    def lines(self, condition: str) -> Iterator[bytes]:
        """Yield the output lines of the answers that meet an SQL condition, in the order of the input."""
        query = f"SELECT record, extra FROM answers WHERE {condition} ORDER BY number"  # noqa: S608 -- our own
        return itertools.starmap(output_line, self.query(query))

    def since(self, turn: int, max_answers: int) -> list[tuple[int, LineResult]]:
        """Return (turn, answer) of the first ``max_answers`` answers committed after ``turn``."""
        query = f"SELECT turn, {_COLUMNS} FROM answers WHERE turn > ? ORDER BY turn LIMIT ?"  # noqa: S608
        return [(row[0], _answer(row[1:])) for row in self.query(query, (turn, max_answers))]

    def query(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of an SQL query, read on a separate connection."""
        with _as_os_errors(self.path):
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
            try:
                yield from database.execute(query, values)
            finally:
                database.close()

    def drop_failed(self) -> int:
        """Delete the answers of failed lines, so that they run again; return their number."""
        with self._transaction():
            sums = self._db.execute(
                "SELECT coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), "
                "coalesce(sum(cached_tokens), 0) FROM answers WHERE code IS NOT NULL"
            ).fetchone()
            totals = self.totals()
            failed, totals.failed, totals.errors = totals.failed, 0, {}
            totals.prompt_tokens -= sums[0]
            totals.completion_tokens -= sums[1]
            totals.cached_tokens -= sums[2]
            self._db.execute("DELETE FROM answers WHERE code IS NOT NULL")
            self._put({"totals": asdict(totals), "state": "new"})
        return failed

    def _check_in_place(self) -> None:
        """Make sure that what is written can be found again."""
        try:
            in_place = os.path.samestat(self.path.stat(), self._file)
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise UsageError(
                f"{self.path} was removed or replaced while the job ran, so its answers cannot be kept; "
                "start the job again"
            )

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
                if self._db.in_transaction:  # SQLite ends it by itself if the disk is full
                    self._db.execute("ROLLBACK")
                raise


def _values(answer: LineResult) -> tuple[Any, ...]:
    return (
        answer.number, answer.digest, answer.id_key, answer.record, answer.extra, answer.code,
        answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens, answer.seconds,
        answer.finish_reason, answer.worker,
    )  # fmt: skip


def _answer(row: tuple[Any, ...]) -> LineResult:
    (number, digest, id_key, record, extra, code, prompt, completion, cached, seconds, reason, worker) = row
    return LineResult(
        number=number, digest=digest, id_key=id_key, record=record, extra=extra, code=code,
        prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, seconds=seconds,
        finish_reason=reason, worker=worker,
    )  # fmt: skip


@contextmanager
def _as_os_errors(path: Path) -> Iterator[None]:
    """Raise SQLite errors as errors of this package or of the operating system.

    Raises:
        UsageError: the file is not a journal.
        OSError: another error; ENOSPC if the disk is full, otherwise EIO.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _NO_JOURNAL or "no such table" in str(error):
            raise UsageError(
                f"{path} is damaged, or not a journal: {error}; start again with --restart"
            ) from error
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(number, str(error), str(path)) from error
