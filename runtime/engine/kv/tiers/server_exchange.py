"""Requests to a server of the Redis protocol, and its answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

_MOST_BYTES = 2**29  # of a value, as servers have it
_LINE = 1 << 12  # bytes received for a line: most of a value comes into its own buffer


class ServerExchange:
    """Sends requests over a socket and reads answers; values into one buffer, which the next one overwrites.

    The protocol: https://valkey.io/topics/protocol. Numbers, values and errors are read, no lists.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""  # received, and not read yet
        self._buffer = bytearray()

    def send(self, requests: Sequence[bytes], until: float) -> None:
        """Send requests.

        Raises:
            TimeoutError: they are not sent at ``until``, in seconds of ``time.monotonic``.
            OSError: the connection is broken.
        """
        for each in requests:
            self._limit(until)
            self._socket.sendall(each)

    def next(self, until: float) -> int | memoryview | None:
        """Return the next answer: a number, a value, or None where the server has no value.

        Raises:
            TimeoutError: it is not here at ``until``, in seconds of ``time.monotonic``.
            ConnectionError: the server has closed the connection, names an error, or breaks the protocol.
            OSError: the connection is broken.
        """
        line = self._line(until)
        if line == b"_":  # as version 3 has it
            return None
        kind, text = line[:1], line[1:]
        if kind == b"-":
            raise ConnectionError(f"the server answered {text.decode(errors='replace')[:200]}")
        if kind not in (b":", b"$") or not text.removeprefix(b"-").isdigit():
            raise ConnectionError(f"the server broke the protocol: {line[:40]!r}")
        number = int(text)
        if kind == b":":
            return number
        return None if number < 0 else self._value(number, until)

    def _line(self, until: float) -> bytes:
        while b"\r\n" not in self._rest:
            if len(self._rest) > _LINE:
                raise ConnectionError(f"the server broke the protocol: {self._rest[:40]!r}")
            self._limit(until)
            received = self._socket.recv(_LINE)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line

    def _value(self, size: int, until: float) -> memoryview:
        if size > _MOST_BYTES:
            raise ConnectionError(f"the server announced a value of {size} bytes")
        whole = size + 2  # with the end of the line
        if len(self._buffer) < whole:
            self._buffer = bytearray(whole)
        view = memoryview(self._buffer)[:whole]
        filled = min(len(self._rest), whole)
        view[:filled], self._rest = self._rest[:filled], self._rest[filled:]
        while filled < whole:
            self._limit(until)
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the server has closed the connection")
            filled += count
        if bytes(view[size:]) != b"\r\n":
            raise ConnectionError(f"the server broke the protocol: a value of {size} bytes has another end")
        return view[:size]

    def _limit(self, until: float) -> None:
        """Let the socket's next call fail at ``until``."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left)
