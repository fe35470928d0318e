"""Two services share prefixes through a real server of the Redis protocol, and go on without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from carryall.runtime.engine.kv.tiers.store import StoreTier
from carryall.runtime.engine.kv.tiers.store_urls import open_store

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVER is None, reason="there is no valkey-server and no redis-server"),
]

PROMPT = "\n".join(f"def function_{i}(a, b):\n    return a * {i} + b" for i in range(12))


class Store:
    """A server on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "store.sock"
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(
            [str(SERVER), *options, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        while not self.socket.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def wait_for_chunks(self, least: int) -> None:
        with redis_client(self) as client:
            until = time.monotonic() + 20
            while client.dbsize() < least:
                assert time.monotonic() < until
                time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def redis_client(store: Store) -> Any:
    redis: Any = pytest.importorskip("redis")
    return redis.Redis(unix_socket_path=str(store.socket))


class Service:
    """A ``carryall serve`` with a cache folder of its own."""

    def __init__(self, folder: Path, url: str, key: str = "a key of 16 or more characters") -> None:
        command = [sys.executable, "-m", "carryall", "serve", "demo", "--json", "--http-port", "0"]
        options = ["--grpc-port", "none", "--prefix-cache-url", url, "--num-threads", "1"]
        environment = {**os.environ, "CARRYALL_KV_KEY": key, "CARRYALL_CACHE": os.environ["CARRYALL_CACHE"]}
        self.process = subprocess.Popen(
            [*command, *options, "--prefix-cache-dir", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and '"http' not in line:
            pass
        self.client = httpx2.Client(base_url=f"http://{json.loads(line)['http']}/v1", timeout=60)

    def complete(self, salt: str | None = None) -> tuple[str, int]:
        """Return the text of a completion, and how many tokens of the prompt came from a cache."""
        body: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        found = self.client.post("/completions", json=body).json()
        cached = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["text"], cached.get("cached_tokens", 0)

    def end(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pytest.importorskip("redis")
    started = Store(tmp_path)
    yield started
    started.end()


def test_the_second_service_has_the_prefix_of_the_first(store: Store, tmp_path: Path) -> None:
    url = f"unix://{store.socket}"
    first, second = Service(tmp_path / "1", url), Service(tmp_path / "2", url)
    stranger = Service(tmp_path / "3", url, key="another key of 16 characters")
    try:
        text, cached = first.complete()
        assert cached == 0
        store.wait_for_chunks(len(PROMPT) // 64 // 4)  # the first writes beside its answer
        second_text, shared = second.complete()
        assert second_text == text
        assert shared >= 64
        assert second.complete("another tenant")[1] == 0
        assert stranger.complete() == (text, 0)
        store.end()
        begun = time.monotonic()
        assert second.complete("a third tenant") == (text, 0)
        assert time.monotonic() - begun < 30
    finally:
        for service in (first, second, stranger):
            service.end()


def test_contents_come_in_order_and_what_is_not_wanted_leaves_nothing_for_the_next(store: Store) -> None:
    chunks = open_store(f"unix://{store.socket}")
    names = [f"{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        if number % 7 != 3:
            chunks.put(name, bytes([number]) * 300_000)
    assert chunks.held(names, 20.0) == 3
    assert chunks.last_held(names[:4], 20.0) == 3
    assert [chunks.has(name) for name in names[2:4]] == [True, False]

    def read(number: int) -> bytes | None:
        content = chunks.read(names[number], names[number + 1 : number + 9], 20.0)
        return None if content is None else bytes(content)

    expected = [None if n % 7 == 3 else bytes([n]) * 300_000 for n in range(20)]
    assert [read(n) for n in range(20)] == expected
    assert [read(n) for n in (0, 1, 2, 9, 4, 5, 5)] == [expected[n] for n in (0, 1, 2, 9, 4, 5, 5)]
    assert chunks.held(names, 20.0) == 3  # with contents on their way
    chunks.forget()
    assert read(19) == expected[19]
    with redis_client(store) as client:
        client.client_kill_filter(skipme=True)  # every other connection
    assert chunks.held(names, 20.0) == 3
    store.end()
    for _ in range(2):
        with pytest.raises(
            Exception, match=r"refused|closed|Broken pipe|No such file"
        ):  # the client's own class
            read(0)
    chunks.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_a_server_that_is_full_evicts_or_refuses_and_gives_what_it_kept(store: Store, policy: str) -> None:
    """32 MB for a server that may have 16."""
    with redis_client(store) as client:
        client.config_set("maxmemory", "16mb")
        client.config_set("maxmemory-policy", policy)
    url, secret = f"unix://{store.socket}", bytes(range(32))
    keys = [bytes([i]) * 32 for i in range(64)]
    writer = StoreTier(open_store(url), secret, lambda: 20.0)
    for i, key in enumerate(keys):
        writer.put(key, [np.full(500_000, i, np.uint8)])
        assert writer.flush(30)
    assert (writer.given_up == 0) == (policy == "allkeys-lru")
    writer.close()
    with redis_client(store) as client:
        assert (client.info("stats")["evicted_keys"] > 0) == (policy == "allkeys-lru")
    reader = StoreTier(open_store(url), secret, lambda: 20.0)
    kept = []
    for i, key in enumerate(keys):
        chunk = reader.get(key)  # valid until the next one is read
        if chunk is not None:
            assert np.array_equal(chunk[0], np.full(500_000, i, np.uint8))
            kept.append(i)
    assert 16 <= len(kept) <= 32
    assert (0 in kept, 63 in kept) == (policy == "noeviction", policy == "allkeys-lru")
    assert reader.refused == 0
    reader.close()
