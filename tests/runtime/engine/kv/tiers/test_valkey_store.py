"""A server of the Redis protocol that lags, lies or goes away; a real one is in ``test_shared_cache.py``."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from carryall.runtime.engine.kv.tiers.store import StoreTier
from carryall.runtime.engine.kv.tiers.store_urls import open_store
from carryall.runtime.engine.kv.tiers.valkey_store import ValkeyStore

pytest.importorskip("redis")

SECONDS = 20.0


class Handler(socketserver.StreamRequestHandler):
    """Reads commands, and answers what the test wants."""

    def handle(self) -> None:
        assert isinstance(self.server, Server)
        self.server.connections.append(self.connection)
        try:
            while line := self.rfile.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    parts.append(self.rfile.read(size + 2)[:-2])
                self.wfile.write(self.server.answer(parts))
        except OSError:
            pass  # the client has gone


class Server(socketserver.ThreadingTCPServer):
    """A server in this process; ``fault`` may replace its answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[bytes, bytes] = {}
        self.fault: Callable[[bytes], bytes | None] = lambda _: None
        self.connections: list[object] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"

    def answer(self, command: list[bytes]) -> bytes:
        name = command[0].upper()
        if (replaced := self.fault(name)) is not None:
            return replaced
        if name == b"SET":
            self.contents[command[1]] = command[2]
        if name == b"EXISTS":
            return b":%d\r\n" % (command[1] in self.contents)
        if name == b"GET":
            content = self.contents.get(command[1])
            return b"$-1\r\n" if content is None else b"$%d\r\n%s\r\n" % (len(content), content)
        return b"+OK\r\n"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    for number in range(8):
        server.contents[f"carryall:kv:{number}".encode()] = bytes([number]) * 3000
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(server: Server) -> Iterator[ValkeyStore]:
    store = open_store(server.url)
    assert isinstance(store, ValkeyStore)
    yield store
    store.close()


def waiting(event: threading.Event) -> Callable[[bytes], None]:
    def wait(_: bytes) -> None:
        event.wait(30)

    return wait


def read(store: ValkeyStore, name: str, *ahead: str, seconds: float = SECONDS) -> bytes | None:
    content = store.read(name, ahead, seconds)
    return None if content is None else bytes(content)


def test_contents_are_asked_for_before_they_are_wanted(server: Server, store: ValkeyStore) -> None:
    names = [str(number) for number in range(9)]
    assert store.held(names, SECONDS) == 8
    assert store.last_held(["x", "7", "x"], SECONDS) == 2
    contents = [read(store, name, *names[i + 1 :]) for i, name in enumerate(names)]
    assert contents == [*(bytes([number]) * 3000 for number in range(8)), None]
    assert len(server.connections) == 1
    assert read(store, "1", "2", "3") == bytes([1]) * 3000
    assert read(store, "2") == bytes([2]) * 3000  # of the same connection: less is wanted than was asked for
    assert len(server.connections) == 1
    assert read(store, "5") == bytes([5]) * 3000  # 3 was on its way
    assert len(server.connections) == 2


def test_a_server_that_lags_is_left_in_time_and_asked_again(server: Server, store: ValkeyStore) -> None:
    assert read(store, "0") == bytes(3000)
    slow = threading.Event()
    server.fault = waiting(slow)
    begun = time.monotonic()
    for call in (lambda: store.held(["0"], 0.1), lambda: read(store, "0", seconds=0.1)):
        with pytest.raises(TimeoutError):
            call()
    assert time.monotonic() - begun < 10
    slow.set()
    server.fault = lambda _: None
    assert read(store, "1") == bytes([1]) * 3000  # and no late answer to an earlier call


def test_a_server_that_does_not_accept_is_left_in_time(server: Server, store: ValkeyStore) -> None:
    accepts = threading.Event()
    server.fault = waiting(accepts)  # the client's first command waits too
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no connection in time"):
            store.held(["0"], 0.1)
    assert time.monotonic() - begun < 4
    assert len(server.connections) == 1  # a connection that is being made is waited for, and not made again
    accepts.set()
    assert store.held(["0"], SECONDS) == 1


def test_a_connection_that_was_closed_is_made_again(server: Server, store: ValkeyStore) -> None:
    assert store.held(["0"], SECONDS) == 1
    (connection,) = server.connections
    connection.shutdown(2)  # type: ignore[attr-defined]
    assert store.held(["0"], SECONDS) == 1
    assert len(server.connections) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "message"),
    [(b":1\r\n", "no value"), (b"*1\r\n", "protocol"), (b"-WRONGTYPE it is a list\r\n", "it is a list")],
)
def test_answers_that_are_no_values_are_refused(
    server: Server, store: ValkeyStore, answer: bytes, message: str
) -> None:
    server.fault = lambda name: answer if name == b"GET" else None
    with pytest.raises(ConnectionError, match=message):
        read(store, "0", "1", "2")
    server.fault = lambda _: None
    assert read(store, "1") == bytes([1]) * 3000


def test_the_tier_computes_what_a_server_does_not_give(server: Server) -> None:
    """What the engine sees: chunks that are missing, and a pause."""
    keys, secret = [bytes([i]) * 32 for i in range(4)], bytes(range(32))
    writer = StoreTier(open_store(server.url), secret, lambda: SECONDS)
    for i, key in enumerate(keys):
        writer.put(key, [np.full((2, 64), i, np.float32)] * 3)
    assert writer.flush(30)
    writer.close()
    tier = StoreTier(open_store(server.url), secret, lambda: SECONDS)
    assert tier.held(keys) == 4
    for i, key in enumerate(keys[:2]):
        parts = tier.get(key, keys[i + 1 :])
        assert parts is not None
        assert [int(part.min()) for part in parts] == [i] * 3
    server.fault = lambda name: b"$7\r\nforgery\r\n" if name == b"GET" else None
    tier.get(keys[2], keys[3:])  # on its way already
    assert tier.get(keys[0]) is None
    assert tier.refused == 1
    server.fault = lambda _: b"-LOADING the dataset\r\n"
    assert tier.held([b"x" * 32]) == 0
    asked = len(server.connections)
    server.fault = lambda _: None
    assert tier.held(keys) == 0  # it is left alone for 1 s
    assert len(server.connections) == asked
    tier.close()
