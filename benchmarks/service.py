"""What serving costs: the same requests through HTTP or gRPC streams, and straight from the engine, in turns.

    python benchmarks/service.py demo --requests 64 --concurrency 8 --tokens 64 --rounds 5
    python benchmarks/service.py demo --transport grpc
    python benchmarks/service.py null --tokens 64    # a model that only sleeps 2 ms a step

The client is a process of its own that counts bytes (``workers/service_client.py``), but on few cores it
takes some processor time from the engine. Reported are ratios: throughput of the service over that of the
engine alone, and how much later the first token comes; and, less sensitive to what else the machine does, the
processor time that a token costs in the process of the service and in that of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workers.service_client import PROMPT, measured

from carryall import AsyncLLM, SamplingParams
from carryall.runtime.process.garbage import lasting_objects
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel, load_served_model
from carryall.runtime.service.grpc.server import GrpcServer
from carryall.runtime.service.http.app import make_app
from carryall.runtime.service.http.server import HttpServer
from carryall.runtime.service.kserve.inference import Inference

CLIENT = Path(__file__).parent / "workers/service_client.py"


def loaded(arguments: argparse.Namespace) -> ServedModel:
    """Return the model; ``null`` is the embedded one without its computations."""
    options: dict[str, Any] = {"max_slots": arguments.concurrency, "prefix_cache": False}
    if arguments.model == "null":
        options |= {"provider": "null", "provider_options": {"step_seconds": 0.002}}
    return load_served_model("demo" if arguments.model == "null" else arguments.model, **options)


async def bare(llm: AsyncLLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the requests to the engine itself, and read them as they grow."""
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)

    async def one(number: int) -> float:
        start, first = time.perf_counter(), 0.0
        async for output in llm.generate(PROMPT.format(n=number), params):
            first = first or time.perf_counter() - start
            assert output.outputs[0].text is not None  # the text is made when it is read
        return first

    loop = time.thread_time()
    found = await measured(arguments.requests, arguments.concurrency, arguments.think_ms, one)
    return found | {"loop": time.thread_time() - loop}


async def served(address: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the client send the requests."""
    shape = (arguments.requests, arguments.concurrency, arguments.tokens, arguments.think_ms)
    command = [sys.executable, str(CLIENT), arguments.transport, address, *map(str, shape)]
    command += ["keep" if arguments.keep_alive else "new"]
    busy, loop = time.process_time(), time.thread_time()
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    mine = {"busy": time.process_time() - busy, "loop": time.thread_time() - loop}
    found = json.loads(done.stdout)
    return {**found, "client": found["busy"], **mine}


def report(rounds: list[tuple[dict[str, Any], dict[str, Any]]], arguments: argparse.Namespace) -> None:
    """Print the medians over the rounds, and the rounds."""

    def told(what: str, values: list[float], form: str) -> None:
        each = ", ".join(format(value, form) for value in values)
        print(f"{what}: {format(statistics.median(values), form)} (rounds: {each})")

    def tokens(name: str, side: int) -> list[float]:
        return [1e6 * one[side][name] / (arguments.requests * arguments.tokens) for one in rounds]

    given = vars(arguments)
    print("{model} over {transport}: {requests} requests of {tokens} tokens, {concurrency} at a time, "
          "up to {think_ms:g} ms before each".format(**given))  # fmt: skip
    speed = [alone["seconds"] / through["seconds"] for alone, through in rounds]
    told("throughput, service / engine", speed, ".3f")
    later = [1000 * (through["first"] - alone["first"]) for alone, through in rounds]
    told("first token later, ms", later, ".1f")
    ratios = [through["busy"] / alone["busy"] for alone, through in rounds]
    told("processor time of a token, process of the service / engine", ratios, ".3f")
    told("  engine alone, us", tokens("busy", 0), ".0f")
    told("  service, us", tokens("busy", 1), ".0f")
    told("  client, us", tokens("client", 1), ".0f")
    told("  event loop with the engine's readers alone, us", tokens("loop", 0), ".0f")
    told("  event loop of the service, us", tokens("loop", 1), ".0f")


async def compare(arguments: argparse.Namespace) -> None:
    """Take turns, and print the ratios."""
    models = ModelRepository.of_one("model", lambda: loaded(arguments))
    config = ServerConfig(http_port=0, grpc_port=0)
    inference = Inference.of(models, config)
    server: GrpcServer | HttpServer
    if arguments.transport == "grpc":
        server = GrpcServer(models, config, inference)
    else:
        server = HttpServer(make_app(models, inference), config)
    address = await server.start()
    await models.load_all()
    rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with lasting_objects():  # as ``carryall serve`` does
        for number in range(-1, arguments.rounds):
            both = await bare(models.llm().model.llm, arguments), await served(address, arguments)
            if number >= 0:  # the first round warms up
                rounds.append(both)
    report(rounds, arguments)
    await server.stop()
    models.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="MODEL, or null")
    parser.add_argument("--transport", choices=["http", "grpc"], default="http")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--think-ms", type=float, default=20.0, help="longest wait before a request")
    parser.add_argument("--keep-alive", action="store_true", help="reuse connections")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
