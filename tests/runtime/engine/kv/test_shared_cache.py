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
import pytest

from carryall.runtime.engine.kv.tiers.chunk_store import open_store

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
        redis: Any = pytest.importorskip("redis")
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            until = time.monotonic() + 20
            while client.dbsize() < least:
                assert time.monotonic() < until
                time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


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


def test_contents_come_in_order_and_an_early_end_leaves_nothing_for_the_next(store: Store) -> None:
    chunks = open_store(f"unix://{store.socket}")
    names = [f"{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        if number % 7 != 3:
            chunks.put(name, bytes([number]) * 300_000)
    expected = [None if n % 7 == 3 else bytes([n]) * 300_000 for n in range(20)]
    assert [*chunks.fetch(names)] == expected
    for taken in range(6):
        contents = chunks.fetch(names)
        assert [next(contents) for _ in range(taken)] == expected[:taken]
        contents.close()
        assert [*chunks.fetch(names[taken : taken + 2])] == expected[taken : taken + 2]
    assert [*chunks.fetch([])] == []
    store.end()
    with pytest.raises(Exception, match="Connection refused"):  # the client's own class
        next(chunks.fetch(names))
    chunks.close()
