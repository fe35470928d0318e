"""A client of ``carryall serve`` that costs little: it counts bytes and reads neither JSON nor messages.

    python benchmarks/workers/service_client.py HTTP|GRPC HOST:PORT REQUESTS CONCURRENCY TOKENS THINK_MS KEEP

Prints one JSON object: the seconds of the run, the median time to the first token in seconds, and the
processor seconds of this process for the run.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

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
            await asyncio.sleep(thought(number, think_ms))
            firsts.append(await one(number))

    begin, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    return figures(begin, busy, firsts)


def thought(number: int, think_ms: float) -> float:
    """Return the seconds before a request."""
    return random.Random(number).uniform(0, think_ms / 1000)


def figures(begin: float, busy: float, firsts: list[float]) -> dict[str, Any]:
    """Return what a run took."""
    return {
        "seconds": time.perf_counter() - begin,
        "first": statistics.median(firsts),
        "busy": time.process_time() - busy,
    }


@dataclass
class Answer:
    """An answer in progress: when it was asked for, when its first event came, and its latest bytes."""

    start: float
    first: float = 0.0
    tail: bytes = b""

    def add(self, data: bytes) -> bool:
        """Look for the first event; return whether the answer is complete."""
        if not data:
            raise ConnectionError("the service ended a stream")
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self.tail = (self.tail + data)[-len(_LAST_CHUNK) :]
        return self.tail == _LAST_CHUNK


def http(host: str, shape: tuple[int, int, int], think_ms: float, *, keep: bool) -> dict[str, Any]:
    """Stream completions, on a new connection each or, with ``keep``, on one connection a stream.

    One thread waits for all sockets: an event loop of asyncio takes half as much processor time again.
    """
    count, concurrency, tokens = shape
    name, _, port = host.partition(":")
    waiting, firsts = iter(range(count)), list[float]()
    due: list[tuple[float, int]] = []  # when to send which request, a heap
    free: list[socket.socket] = []
    reading: dict[socket.socket, Answer] = {}
    sockets = selectors.DefaultSelector()

    def plan() -> None:
        if (number := next(waiting, None)) is not None:
            heapq.heappush(due, (time.perf_counter() + thought(number, think_ms), number))

    def send(number: int) -> None:
        body = json.dumps({"prompt": PROMPT.format(n=number), "max_tokens": tokens, "temperature": 0,
                           "ignore_eos": True, "stream": True})  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        if free:
            connection = free.pop()
        else:
            connection = socket.create_connection((name, int(port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.register(connection, selectors.EVENT_READ)
        reading[connection] = Answer(start)
        connection.sendall((head + body).encode())

    def end(connection: socket.socket) -> None:
        answer = reading.pop(connection)
        firsts.append(answer.first - answer.start)
        if keep:
            free.append(connection)
        else:
            sockets.unregister(connection)
            connection.close()
        plan()

    begin, busy = time.perf_counter(), time.process_time()
    for _ in range(concurrency):
        plan()
    while due or reading:
        for key, _ in sockets.select(max(0.0, due[0][0] - time.perf_counter()) if due else None):
            connection = cast(socket.socket, key.fileobj)
            if reading[connection].add(connection.recv(65536)):
                end(connection)
        while due and due[0][0] <= time.perf_counter():
            send(heapq.heappop(due)[1])
    return figures(begin, busy, firsts)


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
        found = asyncio.run(grpc(host, shape, float(think_ms)))
    else:
        found = http(host, shape, float(think_ms), keep=keep == "keep")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
