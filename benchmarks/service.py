"""What serving costs: the same requests through HTTP streams, and straight from the engine, in turns.

    python benchmarks/service.py demo --requests 64 --concurrency 8 --tokens 64 --rounds 5

The client is a process of its own that does not read the JSON, so its share of the processor is small, but
on few cores it takes some from the engine. Reported are ratios: throughput of the service over that of the
engine alone, and how much later the first token comes; and, less sensitive to what else the machine does, the
processor time that a token costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from carryall import AsyncLLM, SamplingParams
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel, load_served_model
from carryall.runtime.service.http.app import make_app
from carryall.runtime.service.http.server import HttpServer
from carryall.runtime.service.kserve.inference import Inference

PROMPT = "def process(values, limit={n}):\n    result = []\n    for value in values:\n"


async def measured(count: int, concurrency: int, one: Callable[[int], Awaitable[float]]) -> dict[str, Any]:
    """Seconds of ``count`` requests, ``concurrency`` at a time, and each one's time to first token."""
    waiting, firsts = iter(range(count)), list[float]()

    async def worker() -> None:
        for number in waiting:
            firsts.append(await one(number))

    start = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(concurrency)])
    return {"seconds": time.perf_counter() - start, "first": statistics.median(firsts)}


async def bare(llm: AsyncLLM, count: int, concurrency: int, tokens: int) -> dict[str, Any]:
    """Requests to the engine itself, read as they grow."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    async def one(number: int) -> float:
        start, first = time.perf_counter(), 0.0
        async for output in llm.generate(PROMPT.format(n=number), params):
            first = first or time.perf_counter() - start
            assert output.outputs[0].text is not None  # the text is made when it is read
        return first

    return await measured(count, concurrency, one)


async def client(host: str, count: int, concurrency: int, tokens: int, *, keep: bool) -> dict[str, Any]:
    """Requests over HTTP, on a new connection each or, with ``keep``, on one connection a stream."""
    name, _, port = host.partition(":")
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(number: int) -> float:
        body = json.dumps({"prompt": PROMPT.format(n=number), "max_tokens": tokens, "temperature": 0,
                           "ignore_eos": True, "stream": True})  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        start, first = time.perf_counter(), 0.0
        reader, writer = free.pop() if free else await asyncio.open_connection(name, int(port))
        writer.write((head + body).encode())
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):  # the last chunk
            piece = await reader.read(65536)
            if not piece:
                raise SystemExit(f"the service ended a stream: {tail!r}")
            tail = tail[-8:] + piece
            if not first and b"data: " in tail:
                first = time.perf_counter() - start
        if keep:
            free.append((reader, writer))
        else:
            writer.close()
        return first

    return await measured(count, concurrency, one)


async def compare(arguments: argparse.Namespace) -> None:
    """Take turns, and print the ratios."""
    shape = (arguments.requests, arguments.concurrency, arguments.tokens)
    loaded: list[ServedModel] = []

    def load() -> ServedModel:
        loaded.append(load_served_model(arguments.model, max_slots=arguments.concurrency, prefix_cache=False))
        return loaded[0]

    models = ModelRepository.of_one("model", load)
    config = ServerConfig(http_port=0, grpc_port=None)
    server = HttpServer(make_app(models, Inference.of(models, config)), config)
    address = await server.start()
    await models.load_all()
    rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(-1, arguments.rounds):
        busy, loop = time.process_time(), time.thread_time()
        alone = await bare(loaded[0].llm, *shape)
        alone |= {"busy": time.process_time() - busy, "loop": time.thread_time() - loop}
        busy, loop = time.process_time(), time.thread_time()
        command = [sys.executable, __file__, "--client", address, "--requests", str(shape[0])]
        command += ["--concurrency", str(shape[1]), "--tokens", str(shape[2]), "-"]
        command += ["--keep-alive"] if arguments.keep_alive else []
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
        told = json.loads(done.stdout)
        served = told | {"client": told["busy"], "busy": time.process_time() - busy}
        served["loop"] = time.thread_time() - loop
        if number >= 0:  # the first round warms up
            rounds.append((alone, served))
    ratios = [alone["seconds"] / served["seconds"] for alone, served in rounds]
    later = [1000 * (served["first"] - alone["first"]) for alone, served in rounds]
    print(f"{arguments.model}: {shape[0]} requests, {shape[1]} at a time, {shape[2]} tokens each")
    print(f"throughput of the service over the engine: {statistics.median(ratios):.3f} "
          f"(rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")  # fmt: skip
    print(f"first token later by {statistics.median(later):.1f} ms "
          f"(rounds: {', '.join(f'{delay:.1f}' for delay in later)})")  # fmt: skip
    tokens = shape[0] * shape[2]
    extra = [1e6 * (served["busy"] - alone["busy"]) / tokens for alone, served in rounds]
    whole = [1e6 * alone["busy"] / tokens for alone, _ in rounds]
    clients = statistics.median(1e6 * served["client"] / tokens for _, served in rounds)
    print(f"processor time of the client, on the same machine: {clients:.0f} us a token")
    print(f"processor time of this process: {statistics.median(whole):.0f} us a token for the engine, "
          f"{statistics.median(extra):+.0f} us for the service "
          f"(rounds: {', '.join(f'{each:+.0f}' for each in extra)})")  # fmt: skip
    loops = [[1e6 * each["loop"] / tokens for each in both] for both in rounds]
    of_engine, of_service = (statistics.median(side) for side in zip(*loops, strict=True))
    print(f"of it the event loop's thread: {of_engine:.0f} us a token for the engine's readers, "
          f"{of_service:.0f} us with the service")  # fmt: skip
    await server.stop()
    models.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep-alive", action="store_true", help="reuse connections")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        shape = (arguments.requests, arguments.concurrency, arguments.tokens)
        busy = time.process_time()
        found = asyncio.run(client(arguments.client, *shape, keep=arguments.keep_alive))
        print(json.dumps(found | {"busy": time.process_time() - busy}))
    else:
        asyncio.run(compare(arguments))


if __name__ == "__main__":
    main()
