"""A client of ``carryall serve`` that costs little: it counts bytes and reads neither JSON nor messages.

    python benchmarks/workers/service_client.py HTTP|GRPC HOST:PORT REQUESTS CONCURRENCY TOKENS THINK_MS KEEP

Prints one JSON object: the seconds of the run, the median time to the first token in seconds, and the
processor seconds of this process for the run.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

PROMPT = "def process(values, limit={n}):\n    result = []\n    for value in values:\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


async def measured(
    count: int, concurrency: int, think_ms: float, one: Callable[[int], Awaitable[float]]
) -> dict[str, Any]:
    """Run ``count`` requests, ``concurrency`` at a time, and return the seconds and the first tokens' median.

    Before each request, a worker waits for a random time: a client of a service does not know the engine's
    steps. Without it, the engine's own callers send the next request between two steps, and wait for none.
    """
    waiting, firsts = iter(range(count)), list[float]()

    async def worker() -> None:
        for number in waiting:
            await asyncio.sleep(random.Random(number).uniform(0, think_ms / 1000))
            firsts.append(await one(number))

    start, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    return {
        "seconds": time.perf_counter() - start,
        "first": statistics.median(firsts),
        "busy": time.process_time() - busy,
    }


class Reader(asyncio.Protocol):
    """A connection that finds the first event and the end of one answer at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[float] | None = None
        self._first, self._tail = 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    async def ask(self, request: bytes) -> float:
        """Send a request, and return when its first event came; see ``time.perf_counter``."""
        self._first, self._tail = 0.0, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        """Look for the first event and the last chunk."""
        if not self._first and b"data: " in data:
            self._first = time.perf_counter()
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK and self._done is not None:
            self._done.set_result(self._first)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the answer that is not complete."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the service ended a stream"))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


async def http(host: str, shape: tuple[int, int, int], think_ms: float, *, keep: bool) -> dict[str, Any]:
    """Stream completions, on a new connection each or, with ``keep``, on one connection a stream."""
    count, concurrency, tokens = shape
    name, _, port = host.partition(":")
    free: list[Reader] = []

    async def one(number: int) -> float:
        body = json.dumps({"prompt": PROMPT.format(n=number), "max_tokens": tokens, "temperature": 0,
                           "ignore_eos": True, "stream": True})  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        if free:
            reader = free.pop()
        else:
            _, reader = await asyncio.get_running_loop().create_connection(Reader, name, int(port))
        first = await reader.ask((head + body).encode()) - start
        if keep:
            free.append(reader)
        else:
            reader.close()
        return first

    return await measured(count, concurrency, think_ms, one)


async def grpc(host: str, shape: tuple[int, int, int], think_ms: float) -> dict[str, Any]:
    """Stream ``GenerationService.Generate`` on one channel; the responses stay bytes."""
    import grpc

    from carryall.proto import generation_pb2 as pb

    count, concurrency, tokens = shape
    async with grpc.aio.insecure_channel(host) as channel:
        generate = channel.unary_stream("/carryall.v1.GenerationService/Generate")

        async def one(number: int) -> float:
            sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            request = pb.GenerateRequest(text=PROMPT.format(n=number), sampling=sampling)
            start, first = time.perf_counter(), 0.0
            async for _ in generate(request.SerializeToString()):
                first = first or time.perf_counter() - start
            return first

        return await measured(count, concurrency, think_ms, one)


def main(arguments: list[str]) -> None:
    """Run the client and print what it measured."""
    transport, host, count, concurrency, tokens, think_ms, keep = arguments
    shape = (int(count), int(concurrency), int(tokens))
    if transport == "grpc":
        run = grpc(host, shape, float(think_ms))
    else:
        run = http(host, shape, float(think_ms), keep=keep == "keep")
    print(json.dumps(asyncio.run(run)))


if __name__ == "__main__":
    main(sys.argv[1:])
