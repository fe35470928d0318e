"""Many streams at once over HTTP: all are served, memory stays bounded, and a slow reader delays nobody."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from typing import Any

import psutil
import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm

MIB = 2**20


async def opened(served: HttpServed, tokens: int) -> tuple[Any, Any]:
    """A connection on which a stream was asked for."""
    port = int(served.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
    body = json.dumps({"prompt": [5, 6], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


async def stream(served: HttpServed, tokens: int) -> None:
    reader, writer = await opened(served, tokens)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in answer
    assert b"data: [DONE]" in answer


async def idle(llm: Any) -> None:
    async with asyncio.timeout(30):
        while llm.stats().running or llm.stats().waiting:
            await asyncio.sleep(0.01)


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_a_thousand_streams_in_bounded_memory() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=32) as llm, http_serving(llm) as served:

            async def burst() -> None:
                await asyncio.gather(*[stream(served, 16) for _ in range(1000)])

            await burst()  # brings pools and caches to their size
            before = memory()
            for _ in range(3):
                await burst()
            await idle(llm)
            grown = memory() - before
            assert grown < 24 * MIB, f"{grown / MIB:.1f} MiB more after three further bursts"
            assert llm.stats().generated_tokens == 4 * 1000 * 16
            assert psutil.Process().num_fds() < 300

    asyncio.run(scenario())


@pytest.mark.long
def test_a_client_that_does_not_read_delays_no_other_and_takes_no_memory() -> None:
    """Streams that are never read fill their socket's buffer; then the writer waits, and skips states."""

    async def scenario() -> None:
        async with null_llm(max_slots=8) as llm, http_serving(llm) as served:
            readers = [await opened(served, 4000) for _ in range(6)]
            before = memory()
            start = time.monotonic()
            await asyncio.gather(*[stream(served, 64) for _ in range(4)])
            assert time.monotonic() - start < 20
            assert memory() - before < 32 * MIB
            for _, writer in readers:
                writer.transport.abort()
            await idle(llm)

    asyncio.run(scenario())
