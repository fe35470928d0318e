"""Many streams at once: all are served, memory stays bounded, and a slow reader holds up nobody."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from grpc_serving import Served, joined, read, serving
from null_llm import null_llm

from carryall.client import Client
from carryall.proto import generation_pb2 as pb
from carryall.runtime.api.async_llm import AsyncLLM

MIB = 2**20


def ask(text: str, tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling={"max_tokens": tokens, "ignore_eos": True, "seed": 1})


async def burst(served: Served, count: int, tokens: int) -> None:
    """So many streams at the same time, each read to its end."""
    streams = await asyncio.gather(*[read(served.stub.Generate(ask(f"p{n}", tokens))) for n in range(count)])
    assert [len(joined(one)[1]) for one in streams] == [tokens] * count


@pytest.mark.long
@pytest.mark.parametrize(("count", "tokens"), [(200, 8), pytest.param(1000, 32, marks=pytest.mark.slow)])
def test_many_streams_in_bounded_memory(count: int, tokens: int) -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=32) as llm, serving(llm) as served:
            await burst(served, count, tokens)  # brings pools and caches to their size
            before = _memory()
            for _ in range(3):
                await burst(served, count, tokens)
            grown = _memory() - before
            assert grown < 16 * MIB, f"{grown / MIB:.1f} MiB more after three further bursts of {count}"
            assert await _idle(llm)

    asyncio.run(scenario())


def _memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def _idle(llm: AsyncLLM) -> bool:
    async with asyncio.timeout(30):
        while (stats := llm.stats()).running or stats.waiting:
            await asyncio.sleep(0.005)
    return True


def test_a_client_that_does_not_read_delays_no_other() -> None:
    """Streams that are never read fill their windows of flow control; others go on, and the end frees all."""

    async def scenario() -> None:
        async with null_llm(max_slots=16) as llm, serving(llm) as served:
            idle = [served.stub.Generate(ask(f"idle {n}", 4000)) for n in range(8)]
            for call in idle:
                await call.read()
            start = time.monotonic()
            await burst(served, 8, 64)
            assert time.monotonic() - start < 20
            for call in idle:
                call.cancel()
            assert await _idle(llm)

    asyncio.run(scenario())


@pytest.mark.long
def test_clients_that_vanish_free_everything() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=4, step_seconds=0.001) as llm, serving(llm) as served:
            for _ in range(3):
                async with grpc.aio.insecure_channel(served.address) as channel:
                    stub: Any = type(served.stub)(channel)
                    calls = [stub.Generate(ask(f"v{n}", 4000)) for n in range(20)]
                    reads = [asyncio.ensure_future(call.read()) for call in calls]
                    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                    # leaving closes the connection under all of them
                await asyncio.gather(*reads, return_exceptions=True)
            assert await _idle(llm)
            stats = llm.stats()
            assert stats.kv_tokens == stats.idle_kv_tokens
            await burst(served, 4, 4)

    asyncio.run(scenario())


@pytest.mark.slow
def test_calls_wait_for_a_busy_server_as_long_as_their_clients_do() -> None:
    """gRPC itself cancels calls that no handler took within 30 s, as on a host whose processor is starved."""

    async def scenario() -> None:
        async with null_llm(max_slots=4) as llm, serving(llm) as served:
            with Client(served.address) as client, ThreadPoolExecutor(4) as pool:
                loop = asyncio.get_running_loop()
                calls = [
                    loop.run_in_executor(pool, lambda: client.generate("x", max_tokens=2, ignore_eos=True))
                    for _ in range(4)
                ]
                time.sleep(32)  # nothing takes a call
                replies = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(reply).__name__ for reply in replies] == ["Reply"] * 4

    asyncio.run(scenario())
