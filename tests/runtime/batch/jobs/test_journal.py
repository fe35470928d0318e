"""The journal and its writer: atomic commits, and waiting on a full disk."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import UsageError
from carryall.runtime.batch.jobs import writer as module
from carryall.runtime.batch.jobs.journal import Journal, LineResult
from carryall.runtime.batch.jobs.output import export
from carryall.runtime.batch.jobs.writer import GroupWriter, while_full


def answer(number: int, code: str | None = None, size: int = 10) -> LineResult:
    return LineResult(number=number, digest=b"d", record=b"x" * size, code=code, completion_tokens=2)


def numbers(journal: Journal, condition: str = "1") -> list[int]:
    return [each.number for each in journal.answers(condition)]


def test_answers_come_back_in_the_order_of_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit([answer(3), answer(1, "timeout")])
    journal.commit([answer(2)])
    assert numbers(journal) == [1, 2, 3]
    totals = journal.totals()
    assert (totals.completed, totals.failed, totals.completion_tokens) == (2, 1, 6)
    assert totals.errors == {"timeout": 1}
    assert journal.finished(2, 9) == {2: (b"d", None), 3: (b"d", None)}
    assert list(journal.answers("number = 3")) == [answer(3)]
    journal.close()
    assert numbers(Journal(tmp_path, read_only=True)) == [1, 2, 3]


def test_a_line_answered_twice_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit([answer(1)])
    with pytest.raises(OSError, match="UNIQUE"):
        journal.commit([answer(2), answer(1)])
    assert numbers(journal) == [1]
    assert journal.totals().completed == 1


def test_failed_lines_can_be_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit([answer(1), answer(2, "timeout"), answer(3, "server_error")])
    assert journal.drop_failed() == 2
    assert numbers(journal) == [1]
    totals = journal.totals()
    assert (totals.completed, totals.failed, totals.errors, totals.completion_tokens) == (1, 0, {}, 2)


def test_another_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.state_facts({"format_version": 99})
    journal.close()
    with pytest.raises(UsageError, match="format 99"):
        Journal(tmp_path)


def test_a_file_that_is_not_a_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a job folder"):
        Journal(tmp_path, read_only=True)
    (tmp_path / "journal.sqlite3").write_bytes(b"no database at all, but long enough to be looked at" * 9)
    with pytest.raises(
        UsageError, match=r"journal\.sqlite3 is damaged, or not a journal.*not a database.*--restart"
    ):
        Journal(tmp_path)
    (tmp_path / "journal.sqlite3").write_bytes(b"")
    with pytest.raises(UsageError, match=r"not a journal.*--restart"):
        Journal(tmp_path, read_only=True)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_is_removed_ends_the_job(tmp_path: Path, replaced: bool) -> None:
    journal = Journal(tmp_path)
    journal.commit([answer(1)])
    for path in tmp_path.glob("journal.sqlite3*"):
        path.unlink()
    if replaced:
        (tmp_path / "journal.sqlite3").write_bytes(b"")
    with pytest.raises(UsageError, match="was removed or replaced while the job ran"):
        journal.commit([answer(2)])


class Events:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, facts: dict[str, Any]) -> None:
        self.names.append(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_SECONDS", 0.02)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.02)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_disk_pauses_the_job_until_there_is_room(tmp_path: Path) -> None:
    journal, events = Journal(tmp_path), Events()
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite's limit, which raises SQLITE_FULL
    writer = GroupWriter(journal, events, threading.Event())
    for number in range(1, 101):
        writer.put(answer(number, size=5000))
    wait_for(lambda: "paused" in events.names)
    assert len(numbers(journal)) < 100
    journal._db.execute("PRAGMA max_page_count = 100000")
    writer.close()
    assert numbers(journal) == list(range(1, 101))
    assert journal.totals().completed == 100
    assert [name for name in events.names if name != "progress"] == ["paused", "resumed"]


def test_a_paused_job_can_be_stopped(tmp_path: Path) -> None:
    stop, events = threading.Event(), Events()

    def full() -> None:
        raise OSError(28, "No space left on device", "f")

    thread = threading.Timer(0.1, stop.set)
    thread.start()
    with pytest.raises(OSError, match="No space"):
        while_full(full, events, stop)
    assert events.names == ["paused"]
    thread.join()


def test_an_output_on_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    journal, events, out = Journal(tmp_path), Events(), tmp_path / "out.jsonl"
    journal.commit([answer(1)])
    full = tmp_path / ".out.jsonl.partial"
    full.symlink_to("/dev/full")
    attempts = []

    def write() -> None:
        attempts.append(out.exists())
        if len(attempts) == 1:
            with pytest.raises(OSError, match="No space") as error:
                export(journal, str(out), None)
            assert not out.exists()
            raise error.value
        export(journal, str(out), None)

    while_full(write, events, threading.Event())
    assert attempts == [False, False]
    assert out.read_bytes() == b"x" * 10 + b"\n"
    assert events.names == ["paused", "resumed"]


def test_a_journal_that_fails_for_another_reason_ends_the_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    writer = GroupWriter(journal, Events(), threading.Event())
    journal._db.close()
    writer.put(answer(1))
    wait_for(lambda: writer.error is not None)
    with pytest.raises(OSError, match="closed database"):
        writer.put(answer(2))
    with pytest.raises(OSError, match="closed database"):
        writer.close()


def test_commits_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMIT_SECONDS", 5.0)
    monkeypatch.setattr(module, "COMMIT_LINES", 100)
    journal, events = Journal(tmp_path), Events()
    writer = GroupWriter(journal, events, threading.Event())
    for number in range(1, 251):
        writer.put(answer(number))
    writer.close()
    assert events.names == ["progress"] * 3


def test_every_commit_is_on_the_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.commit([answer(1)])
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tmp_path.glob("journal.sqlite3*"):  # as after a crash
        (copy / path.name).write_bytes(path.read_bytes())
    assert numbers(Journal(copy)) == [1]
    assert sqlite3.connect(copy / "journal.sqlite3").execute("PRAGMA integrity_check").fetchone() == ("ok",)
