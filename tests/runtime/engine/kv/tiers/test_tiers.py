"""The tiers of host memory and files: budgets, order of eviction, other processes."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from carryall.runtime.engine.kv.tiers import disk
from carryall.runtime.engine.kv.tiers.disk import DiskTier
from carryall.runtime.engine.kv.tiers.host import HostTier
from carryall.runtime.engine.requests.chunk import CHUNK_TOKENS, ChunkKeys

SECRET = b"s" * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def chunk(number: int) -> list[np.ndarray]:
    return [np.full(25, number, np.int32)]  # 100 bytes


def value(parts: object) -> int | None:
    return None if parts is None else int(parts[0][0])  # type: ignore[index]


def test_names_tell_tokens_models_and_salts_apart() -> None:
    tokens = np.arange(3 * CHUNK_TOKENS)
    keys = ChunkKeys("model", None).extend(tokens)
    assert len(set(keys)) == 3
    assert ChunkKeys("model", None).extend(tokens[:-1]) == keys[:2]
    for identity, salt in (("other", None), ("model", "salt"), ("model", "")):
        assert not set(ChunkKeys(identity, salt).extend(tokens)) & set(keys)
    changed = tokens.copy()
    changed[0] += 1
    assert not set(ChunkKeys("model", None).extend(changed)) & set(keys)


def test_names_grow_with_the_sequence() -> None:
    tokens = np.arange(300)
    growing = ChunkKeys("model", None)
    for end in range(0, 301, 20):
        assert growing.extend(tokens[:end]) == ChunkKeys("model", None).extend(tokens[:end])


def test_the_host_tier_gives_way_downwards_least_recently_used_first(tmp_path: Path) -> None:
    below = DiskTier(tmp_path, 10**6, SECRET)
    tier = HostTier(250, below)
    tier.put(key(1), chunk(1))
    tier.put(key(2), chunk(2))
    assert value(tier.get(key(1))) == 1
    tier.put(key(3), chunk(3))
    assert tier.held_bytes == 200
    below.flush()
    assert key(2) in below
    assert key(1) not in below
    assert [value(tier.get(key(n))) for n in (1, 2, 3, 4)] == [1, 2, 3, None]
    tier.close()
    assert tier.held_bytes == 0
    later = DiskTier(tmp_path, 10**6, SECRET)
    assert [value(later.get(key(n))) for n in (1, 2, 3)] == [1, 2, 3]
    later.close()


def test_without_a_tier_below_what_has_no_room_is_gone() -> None:
    tier = HostTier(150)
    tier.put(key(1), chunk(1))
    tier.put(key(2), chunk(2))
    assert key(1) not in tier
    assert value(tier.get(key(2))) == 2
    tier.close()


def test_files_stay_within_their_budget(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1500, SECRET)
    for number in range(1, 9):
        tier.put(key(number), chunk(number))
        tier.flush()
        if number > 1:
            assert tier.get(key(1)) is not None  # always the most recently used
        os.utime(tier.path(key(1)), (2e9, 2e9))
    tier.close()
    held = list(tmp_path.glob("??/*.kv"))
    assert sum(path.stat().st_size for path in held) <= 1500
    assert tier.path(key(1)) in held
    assert tier.path(key(2)) not in held


def test_a_smaller_budget_counts_at_once(tmp_path: Path) -> None:
    """It must not wait for the next write, for which the disk may have no space."""
    tier = DiskTier(tmp_path, 10**6, SECRET)
    for number in range(9):
        tier.put(key(number), chunk(number))
    tier.close()
    DiskTier(tmp_path, 1500, SECRET).close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("??/*.kv")) <= 1500


def test_a_damaged_file_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET)
    tier.put(key(1), chunk(1))
    tier.flush()
    path = tier.path(key(1))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert key(1) in tier
    assert tier.get(key(1)) is None
    assert key(1) not in tier
    assert "is deleted" in caplog.text
    tier.close()


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    ours, theirs = DiskTier(tmp_path, 10**6, SECRET), DiskTier(tmp_path, 10**6, SECRET)
    for number in range(20):
        ours.put(key(number), chunk(number))
        theirs.put(key(number), chunk(number))
    ours.flush()
    theirs.flush()
    assert [value(theirs.get(key(n))) for n in range(20)] == list(range(20))
    mapped = ours.get(key(5))
    theirs.path(key(5)).unlink()
    assert value(mapped) == 5
    assert ours.get(key(5)) is None
    assert not list(tmp_path.glob("??/*.tmp"))
    ours.close()
    theirs.close()


def test_chunks_that_cannot_be_written_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET, max_pending_bytes=150)
    tier.path(key(1)).parent.write_text("no folder")
    tier.put(key(1), chunk(1))
    tier.flush()
    assert tier.given_up == 1
    assert "cannot be written" in caplog.text
    tier.put(key(2), chunk(2) * 2)
    assert tier.given_up == 2
    assert key(2) not in tier
    tier.close()
    tier.put(key(3), chunk(3))
    assert tier.given_up == 3


def test_a_disk_that_refuses_every_chunk_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET)
    for number, blocked in ((1, True), (2, True), (3, False), (4, True)):
        if blocked:
            tier.path(key(number)).parent.write_text("no folder")
        tier.put(key(number), chunk(number))
        tier.flush()
    assert caplog.text.count("cannot be written") == 2
    tier.close()


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, struct.error])
def test_requests_continue_when_the_writer_thread_ends(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET, max_pending_bytes=250)
    tier.put(key(1), chunk(1))
    tier.flush()
    entered, go_on = threading.Event(), threading.Event()

    def fail(*_: object) -> int:
        entered.set()
        assert go_on.wait(20)
        raise error("a fault")

    monkeypatch.setattr(disk, "write_chunk", fail)
    tier.put(key(2), chunk(2))
    assert entered.wait(20)
    tier.put(key(3), chunk(3))
    waiting = [
        threading.Thread(target=tier.flush, daemon=True),
        threading.Thread(target=tier.put, args=(key(4), chunk(4)), kwargs={"wait": True}, daemon=True),
    ]
    for thread in waiting:
        thread.start()
    go_on.set()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert tier.disabled == f"{error.__name__}: a fault"
    assert f"the prefix cache in {tmp_path} is disabled: {error.__name__}: a fault" in caplog.text
    assert tier.given_up == 3
    assert key(1) not in tier
    assert tier.get(key(1)) is None
    tier.close()


def test_users_of_a_folder_find_only_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = DiskTier(tmp_path, 10**6, SECRET), DiskTier(tmp_path, 10**6, b"t" * 32)
    theirs.put(key(1), chunk(1))
    theirs.flush()
    assert key(1) not in ours
    ours.path(key(1)).parent.mkdir(exist_ok=True)
    theirs.path(key(1)).rename(ours.path(key(1)))  # knowing the name of the file does not help
    assert ours.get(key(1)) is None
    assert "without this user's key" in caplog.text
    ours.close()
    theirs.close()


def test_writes_that_can_wait_are_not_dropped(tmp_path: Path) -> None:
    tier = HostTier(10**6, below := DiskTier(tmp_path, 10**6, SECRET, max_pending_bytes=150))
    for number in range(10):
        tier.put(key(number), chunk(number))
    tier.close()
    assert below.given_up == 0
    assert len(list(tmp_path.glob("??/*.kv"))) == 10


def test_a_folder_that_may_only_be_read_still_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET)
    tier.put(key(1), chunk(1))
    tier.flush()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "utime", refused)
    assert value(tier.get(key(1))) == 1
    monkeypatch.setattr("mmap.mmap", refused)  # such as too many open files
    assert tier.get(key(1)) is None
    assert "cannot be read" in caplog.text
    monkeypatch.undo()
    assert value(tier.get(key(1))) == 1
    tier.close()


def test_a_folder_that_may_not_be_looked_into_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 10**6, SECRET)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "stat", refused)
    assert key(1) not in tier
    monkeypatch.undo()
    tier.close()


def test_leftovers_of_killed_processes_are_swept(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    old, new = tmp_path / "ab" / "x.kv.1.tmp", tmp_path / "ab" / "x.kv.2.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (1e9, 1e9))
    DiskTier(tmp_path, 10**6, SECRET).close()
    assert not old.exists()
    assert new.exists()
