"""The shared tier: hits, and stores that lie, lag, are full or are gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
import pytest

from carryall.errors import UsageError
from carryall.runtime.engine.kv.tiers.bounded_store import BoundedStore
from carryall.runtime.engine.kv.tiers.disk import DiskTier
from carryall.runtime.engine.kv.tiers.file_system_store import FileSystemStore
from carryall.runtime.engine.kv.tiers.host import HostTier
from carryall.runtime.engine.kv.tiers.kv_file import file_name
from carryall.runtime.engine.kv.tiers.store import StoreTier
from carryall.runtime.engine.kv.tiers.store_urls import open_store
from carryall.runtime.engine.requests.chunk import Parts

SECRET = bytes(range(32))
KEYS = [bytes([i]) * 32 for i in range(4)]


class MemoryStore:
    """A store in this process, with faults that a test sets."""

    read_only = False

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fault: Callable[[], None] = lambda: None
        self.calls = 0
        self.fetched: list[list[str]] = []

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._call()
        return [name in self.contents for name in names]

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        self.fetched.append([*names])
        for name in names:
            self._call()
            yield self.contents.get(name)

    def put(self, name: str, content: bytes) -> None:
        self._call()
        self.contents[name] = content

    def close(self) -> None:
        self.contents = dict(self.contents)

    def _call(self) -> None:
        self.calls += 1
        self.fault()


def parts(number: int) -> Parts:
    return [np.full((2, 3), number, np.float32), np.arange(4, dtype=np.int8)]


def waiting(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        event.wait(30)

    return wait


def opened(store: MemoryStore, patience: float = 5.0) -> StoreTier:
    return StoreTier(BoundedStore(store), SECRET, lambda: patience)


def filled(store: MemoryStore) -> StoreTier:
    tier = opened(store, 0.2)
    for i, key in enumerate(KEYS[:3]):
        tier.put(key, parts(i))
    assert tier.flush(10)
    return tier


def test_another_process_finds_the_chunks() -> None:
    store = MemoryStore()
    filled(store).close()
    tier = opened(store)
    assert KEYS[0] not in tier  # not asked yet
    assert tier.held(KEYS) == 3
    assert KEYS[0] in tier
    found = tier.get(KEYS[1])
    assert found is not None
    assert np.array_equal(found[0], parts(1)[0])
    assert found[1].dtype == np.int8
    assert tier.get(KEYS[3]) is None
    tier.close()


def test_chunks_of_another_key_are_not_found() -> None:
    store = MemoryStore()
    filled(store).close()
    stranger = StoreTier(BoundedStore(store), bytes(32), lambda: 5.0)
    assert stranger.held(KEYS) == 0
    stranger.close()


@pytest.mark.parametrize("change", ["cut", "bit", "swap", "empty"])
def test_a_store_that_lies_is_refused(change: str) -> None:
    store = MemoryStore()
    filled(store).close()
    names = list(store.contents)
    content = store.contents[names[0]]
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    wrong = {"cut": content[:-7], "bit": flipped, "swap": store.contents[names[1]], "empty": b""}
    store.contents[names[0]] = wrong[change]
    tier = opened(store)
    assert tier.held(KEYS) == 3
    assert tier.get(KEYS[0]) is None
    assert tier.refused == 1
    assert tier.get(KEYS[2]) is not None
    tier.close()


def test_a_store_that_lags_delays_no_longer_than_computing_and_is_left_alone() -> None:
    store = MemoryStore()
    filled(store).close()
    hangs = threading.Event()
    store.fault = waiting(hangs)
    tier = opened(store, 0.05)
    begun = time.monotonic()
    assert tier.held(KEYS) == 0
    first = time.monotonic() - begun
    assert 0.15 < first < 10  # four chunks of 50 ms
    calls = store.calls
    assert [tier.get(key) for key in KEYS] == [None] * 4
    assert store.calls == calls
    hangs.set()
    store.fault = lambda: None
    tier._backoff._until = 0.0  # as after the pause
    until = time.monotonic() + 10
    while tier.held(KEYS) < 3 and time.monotonic() < until:
        tier._backoff._until = 0.0
    assert tier.held(KEYS) == 3
    tier.close()


def test_a_store_that_is_gone_loses_chunks_and_nothing_else() -> None:
    store = MemoryStore()

    def gone() -> None:
        raise ConnectionError("refused")

    store.fault = gone
    tier = opened(store)
    assert tier.held(KEYS) == 0
    tier.put(KEYS[0], parts(0))
    assert tier.flush(10)
    assert tier.given_up == 1
    assert tier.get(KEYS[0]) is None
    assert store.calls == 1  # paused after the first failure
    tier.close()


def test_a_full_store_loses_chunks_and_answers_later() -> None:
    store = MemoryStore()
    filled(store).close()
    full = MemoryError("OOM command not allowed when used memory > 'maxmemory'")

    class Full(MemoryStore):
        def put(self, name: str, content: bytes) -> None:
            raise full

    refusing = Full()
    refusing.contents = store.contents
    tier = opened(refusing)
    tier.put(KEYS[3], parts(3))
    assert tier.flush(10)
    assert tier.given_up == 1
    tier._backoff._until = 0.0  # as after the pause
    assert tier.held(KEYS) == 3
    tier.close()


def test_more_than_the_queue_holds_is_dropped() -> None:
    tier = StoreTier(BoundedStore(MemoryStore()), SECRET, lambda: 5.0, max_pending_bytes=10)
    tier.put(KEYS[0], parts(0))
    assert tier.given_up == 1
    tier.close()


def test_closing_does_not_wait_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carryall.runtime.engine.kv.tiers.store._CLOSE_SECONDS", 0.2)
    store, hangs = MemoryStore(), threading.Event()
    store.fault = waiting(hangs)
    tier = opened(store)
    tier.put(KEYS[0], parts(0))
    begun = time.monotonic()
    tier.close()
    assert time.monotonic() - begun < 15
    assert tier.given_up == 1
    hangs.set()


def test_chunks_are_read_ahead_of_those_who_ask() -> None:
    store = MemoryStore()
    writer = opened(store)
    keys = [bytes([i]) * 32 for i in range(40)]
    for i, key in enumerate(keys):
        writer.put(key, parts(i))
    assert writer.flush(10)
    writer.close()
    tier = opened(store)
    for i, key in enumerate(keys):
        found = tier.get(key, keys[i + 1 : i + 9])
        assert found is not None
        assert found[0][0, 0] == i
    asked = [name for names in store.fetched for name in names]
    assert asked == [file_name(key, SECRET) for key in keys]
    assert len(store.fetched) < 12  # not one exchange each
    tier.close()


def test_chunks_that_were_read_ahead_in_vain_are_dropped() -> None:
    store = MemoryStore()
    filled(store).close()
    bounded = BoundedStore(store)
    tier = StoreTier(bounded, SECRET, lambda: 5.0)
    assert tier.get(KEYS[0], KEYS[1:3]) is not None
    assert wait(bounded._ahead.values(), 10).not_done == set()
    store.contents.clear()
    assert tier.get(KEYS[2]) is not None  # it was read
    assert tier.get(KEYS[0], KEYS[1:3]) is None
    assert tier.get(KEYS[1]) is None
    tier.close()


@pytest.mark.parametrize("change", ["fails", "lies", "misses"])
def test_a_fault_behind_the_first_chunk_ends_what_is_read_ahead(change: str) -> None:
    store = MemoryStore()
    filled(store).close()
    tier = opened(store)
    name, good = file_name(KEYS[1], SECRET), dict(store.contents)
    if change == "fails":

        def broken() -> None:
            if store.calls == 2:
                raise ConnectionError("reset")

        store.calls, store.fault = 0, broken
    if change == "lies":
        store.contents[name] = store.contents[name][:-1]
    if change == "misses":
        del store.contents[name]
    assert tier.get(KEYS[0], KEYS[1:3]) is not None
    assert tier.get(KEYS[1], KEYS[2:3]) is None
    assert tier.refused == (change == "lies")
    store.contents, store.fault = good, lambda: None
    assert (tier.get(KEYS[1]) is None) == (change == "fails")  # then it is left alone for 1 s
    tier._backoff._until = 0.0  # as after the pause
    assert [tier.get(key, KEYS[i + 1 : 3]) is not None for i, key in enumerate(KEYS[:3])] == [True] * 3
    tier.close()


def test_the_own_tiers_come_first(tmp_path: Path) -> None:
    store = MemoryStore()
    filled(store).close()
    disk = DiskTier(tmp_path, 1 << 20, SECRET)
    disk.put(KEYS[0], parts(9))
    disk.flush()
    tier = HostTier(1 << 20, StoreTier(BoundedStore(store), SECRET, lambda: 5.0, disk))
    assert tier.shared
    tier.put(KEYS[3], parts(3))
    assert tier.held(KEYS) == 4  # on disk, in the store, in memory
    assert [tier.last_held([b"x" * 32, key, b"x" * 32]) for key in KEYS] == [2] * 4
    assert tier.last_held([b"x" * 32]) == 0
    found = tier.get(KEYS[0])
    assert found is not None
    assert found[0][0, 0] == 9
    tier.close()
    assert len(store.contents) == 4  # put at once, not when memory is full


def test_a_folder_of_a_file_system_is_a_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = open_store(f"file://{tmp_path}/kv [a-z]*")  # no pattern
    assert isinstance(store, BoundedStore)
    assert isinstance(store.client, FileSystemStore)
    tier = StoreTier(store, SECRET, lambda: 5.0)
    tier.put(KEYS[0], parts(0))
    assert tier.flush(10)
    tier.close()
    other = StoreTier(open_store(f"file://{tmp_path}/kv [a-z]*"), SECRET, lambda: 5.0)
    assert other.held(KEYS) == 1
    assert other.last_held([KEYS[3], KEYS[0], KEYS[2]]) == 2
    assert other.last_held(KEYS[1:]) == 0
    assert other.get(KEYS[0], KEYS[1:]) is not None
    assert other.get(KEYS[1], KEYS[2:]) is None
    assert not list(tmp_path.rglob("*.tmp"))
    other.close()


def s3_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start a server of S3's protocol; return what ends it."""
    pytest.importorskip("s3fs")
    servers: Any = pytest.importorskip("moto.server")
    server = servers.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    httpx2.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()  # its contents outlive it
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    return cast("Callable[[], None]", server.stop)


def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Start a server of Google Cloud Storage's protocol; return what ends it."""
    # Else it asks by gRPC, which the emulator lacks, what kind of bucket there is. Read when it is imported.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    servers: Any = pytest.importorskip("gcp_storage_emulator.server")
    fsspec: Any = pytest.importorskip("fsspec")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    server = servers.create_server("127.0.0.1", port, in_memory=True)
    server.start()
    monkeypatch.setitem(
        fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}"}
    )
    return cast("Callable[[], None]", server.stop)


@pytest.fixture(params=["s3", "gs"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system of a server of buckets, with one."""
    fsspec: Any = pytest.importorskip("fsspec")
    end = {"s3": s3_server, "gs": gcs_server}[request.param](monkeypatch)
    files = fsspec.filesystem(request.param, skip_instance_cache=True, use_listings_cache=False)
    files.mkdir("bucket")
    try:
        yield files
    finally:
        end()
        type(files).clear_instance_cache()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of the server
def test_a_folder_of_a_bucket_is_a_store(buckets: Any) -> None:
    url = f"{buckets.unstrip_protocol('bucket')}/kv"
    tier, other = (StoreTier(open_store(url), SECRET, lambda: 30.0) for _ in range(2))
    assert other.held(KEYS) == 0  # nothing of that may be remembered
    for i, key in enumerate(KEYS[:3]):
        tier.put(key, parts(i))
    assert tier.flush(30)
    assert (tier.given_up, other.held(KEYS)) == (0, 3)
    for i, key in enumerate(KEYS[:3]):
        found = other.get(key, KEYS[i + 1 : 3])
        assert found is not None
        assert np.array_equal(found[0], parts(i)[0])
    assert other.get(KEYS[3]) is None
    tier.close()
    other.close()
    assert sorted(buckets.find("bucket")) == sorted(
        f"bucket/kv/{name[:2]}/{name}.kv" for name in (file_name(key, SECRET) for key in KEYS[:3])
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of the server
def test_a_bucket_that_is_absent_is_not_made(buckets: Any) -> None:
    url = f"{buckets.unstrip_protocol('mistake')}/kv"
    tier = StoreTier(open_store(url), SECRET, lambda: 30.0)
    assert tier.held(KEYS) == 0
    tier.put(KEYS[0], parts(0))
    assert tier.flush(30)
    assert tier.given_up == 1
    assert tier.get(KEYS[0]) is None
    tier.close()
    assert [each.rstrip("/") for each in buckets.ls("")] == ["bucket"]


@pytest.mark.parametrize("url", ["", "kv", "/mnt/kv", "nosuch://host/x"])
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="prefix_cache_url"):
        open_store(url)
