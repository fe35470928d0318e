"""Connections that are slow or endless end alone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.service.http.protocol import MOST_HEAD_BYTES, LimitedProtocol

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@asynccontextmanager
async def connection(served: HttpServed) -> AsyncIterator[tuple[Any, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: Any) -> bytes:
    """One response without a body."""
    return bytes(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10))


async def sent_until_closed(reader: Any, writer: Any, pieces: Iterable[bytes], pause: float) -> int:
    """Send pieces until the server closes the connection, and return the number of bytes sent."""
    sent = 0
    for piece in pieces:
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            break
        sent += len(piece)
        if reader.at_eof():
            break
        await asyncio.sleep(pause)
    return sent


@pytest.mark.long
def test_an_idle_connection_outlasts_the_pools_of_clients() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, connection(served) as (reader, writer):
            for pause in (6, 0):  # httpx keeps idle connections for 5 s
                writer.write(GET + b"\r\n")
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(pause)

    asyncio.run(scenario())


def test_a_slow_head_ends_its_connection() -> None:
    async def scenario() -> None:
        async with (
            null_llm() as llm,
            http_serving(llm, body_timeout_seconds=0.3) as served,
            connection(served) as (silent, _),
            connection(served) as (reader, writer),
        ):
            start = time.monotonic()
            sent = await sent_until_closed(reader, writer, (bytes([byte]) for byte in GET), 0.05)
            assert 0 < sent < len(GET)
            assert time.monotonic() - start > 0.2
            assert await asyncio.wait_for(silent.read(), 5) == b""  # no byte was sent
            assert (await served.client.get("/health")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.long
def test_later_requests_of_a_connection_have_their_own_time() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, body_timeout_seconds=0.4) as served:
            async with connection(served) as (reader, writer):
                for _ in range(3):
                    writer.write(GET)
                    await asyncio.sleep(0.25)  # in all longer than the limit
                    writer.write(b"\r\n")
                    assert b" 200 " in await answer(reader)
                writer.write(GET)
                assert await asyncio.wait_for(reader.read(), 5) == b""
            stream = await served.post(
                "/v1/completions", prompt="x", max_tokens=600, ignore_eos=True, stream=True
            )
            assert stream.text.endswith("data: [DONE]\n\n")  # an answer may take longer

    asyncio.run(scenario())


def test_an_endless_head_is_refused() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            async with connection(served) as (reader, writer):
                lines = [b"X: " + b"y" * 1000 + b"\r\n"] * (MOST_HEAD_BYTES // 10)
                sent = await sent_until_closed(reader, writer, [GET, *lines], 0)
                assert MOST_HEAD_BYTES < sent < 50 * MOST_HEAD_BYTES  # some are in buffers of the system
            long = {"prompt": "x", "user": "y" * 100_000, "max_tokens": 1}
            assert (await served.post("/v1/completions", **long)).status_code == 200
            assert (await served.client.get("/health", headers={"X": "y" * 30_000})).status_code == 200

    asyncio.run(scenario())


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """With Nagle's algorithm, an answer waits for 40 ms until its head is acknowledged."""

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, connection(served) as (reader, writer):
            writer.write(GET + b"\r\n")
            await answer(reader)
            connections: Any = served.server._server.server_state.connections
            assert connections
            for one in connections:
                accepted = one.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    asyncio.run(scenario())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has TCP_USER_TIMEOUT")
def test_connections_of_lost_hosts_are_probed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[tuple[int, ...]]()
    made = LimitedProtocol.connection_made

    def read_options(self: LimitedProtocol, transport: Any) -> None:
        accepted = transport.get_extra_info("socket")
        alive = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        found.append((alive, *(accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names)))
        made(self, transport)

    async def scenario() -> None:
        async with http_serving(None) as served, connection(served) as (reader, writer):
            writer.write(GET + b"\r\n")
            await answer(reader)

    monkeypatch.setattr(LimitedProtocol, "connection_made", read_options)
    asyncio.run(scenario())
    assert found == [(1, 60, 10, 6, 120_000)]
