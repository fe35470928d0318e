"""A store in a server of the Redis protocol."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from .....errors import UsageError
from .chunk_store import Content, imported, last_name, names_held
from .server_exchange import ServerExchange

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_SOCKET_SECONDS = 5.0  # then a call that nobody waits for fails
_IN_FLIGHT = 4  # requests that are sent before the first is answered


class _Connected(NamedTuple):
    """A connection of the client, and the exchange over its socket."""

    connection: Any
    exchange: ServerExchange

    def send(self, command: str, names: Sequence[str], until: float) -> None:
        """Send a command for each name."""
        if names:
            requests = self.connection.pack_commands([(command, _key(name)) for name in names])
            self.exchange.send(requests, until)


class ValkeyStore:
    """A store in a server that evicts by its own policy (``maxmemory-policy``); see ``ChunkStore``.

    The client connects, authenticates and writes. Answers to the engine are read from the connection's socket
    into one buffer: the client's parser would copy each value twice into new memory, which takes three times
    as long and delays the other threads.

    Args:
        url: ``redis://[user:password@]host:port/database``, or with ``rediss``, ``valkey`` or ``unix``.

    Raises:
        UsageError: the client is not installed, or the URL is invalid.
    """

    read_only = False

    def __init__(self, url: str) -> None:
        client = imported("redis")
        scheme, _, rest = url.partition("://")
        try:
            self._client: Any = client.Redis.from_url(
                f"{SCHEMES[scheme]}://{rest}",
                protocol=2,  # version 3 may send messages between answers
                socket_timeout=_SOCKET_SECONDS,
                socket_connect_timeout=_SOCKET_SECONDS,
            )
        except ValueError as error:
            raise UsageError(f"prefix_cache_url is no URL of a server: {error}") from error
        self._connecting: Future[_Connected] | None = None
        self._asked = deque[str]()  # names whose contents are on their way

    def held(self, names: Sequence[str], seconds: float) -> int:
        return names_held(self._exist(names, seconds))

    def last_held(self, names: Sequence[str], seconds: float) -> int:
        return last_name(self._exist(names, seconds)[::-1], len(names))

    def read(self, name: str, ahead: Sequence[str], seconds: float) -> Content | None:
        until = time.monotonic() + seconds
        wanted = [name, *ahead][:_IN_FLIGHT]
        if any(asked != each for asked, each in zip(self._asked, wanted, strict=False)):
            self.forget()
        try:
            connected = self._connected(until)
            if 2 * len(self._asked) <= _IN_FLIGHT:
                connected.send("GET", wanted[len(self._asked) :], until)
                self._asked.extend(wanted[len(self._asked) :])
            content = connected.exchange.next(until)
        except Exception:
            self._disconnect()
            raise
        self._asked.popleft()
        if isinstance(content, int):
            self._disconnect()
            raise ConnectionError(f"the server answered {content}, and no value")
        return content

    def forget(self) -> None:
        if self._asked:  # who asks next must not read these answers
            self._disconnect()

    def has(self, name: str) -> bool:
        return bool(self._client.exists(_key(name)))

    def put(self, name: str, content: bytes) -> None:
        self._client.set(_key(name), content)

    def close(self) -> None:
        self._disconnect()
        self._client.close()

    def _exist(self, names: Sequence[str], seconds: float) -> list[bool]:
        """Return whether each name has a content, by one exchange."""
        until = time.monotonic() + seconds
        self.forget()
        kept = self._connecting is not None
        try:
            return self._exchanged(names, until)
        except ConnectionError:  # a server closes connections that were not used for long
            if not kept:
                raise
        return self._exchanged(names, until)

    def _exchanged(self, names: Sequence[str], until: float) -> list[bool]:
        try:
            connected = self._connected(until)
            connected.send("EXISTS", names, until)
            return [bool(connected.exchange.next(until)) for _ in names]
        except Exception:
            self._disconnect()
            raise

    def _connected(self, until: float) -> _Connected:
        """Return the engine's connection; it is made in a thread, since looking up a host has no limit.

        Raises:
            TimeoutError: there is none in time.
        """
        if self._connecting is None or (self._connecting.done() and self._connecting.exception()):
            self._connecting = Future()
            connect = threading.Thread(
                target=self._connect, args=[self._connecting], name="carryall-kv-connect", daemon=True
            )
            connect.start()
        try:
            return self._connecting.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("no connection in time") from None

    def _connect(self, future: Future[_Connected]) -> None:
        try:
            connection = self._client.connection_pool.get_connection()
            # The client names its socket nowhere else.
            future.set_result(_Connected(connection, ServerExchange(connection._sock)))  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 -- who waits raises it
            future.set_exception(error)

    def _disconnect(self) -> None:
        """Close the engine's connection; one that is still being made is kept."""
        self._asked.clear()
        if self._connecting is None or not self._connecting.done():
            return
        with contextlib.suppress(Exception):  # there is none, or it is broken
            connection = self._connecting.result().connection
            connection.disconnect()
            self._client.connection_pool.release(connection)
        self._connecting = None


def _key(name: str) -> str:
    return f"carryall:kv:{name}"
