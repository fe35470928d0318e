"""A decode service reads KV from the prefill server's memory over gRPC, with keys, and when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from api_keys import key_file
from grpc_serving import code_of, read, serving
from http_serving import http_serving
from null_llm import null_llm, null_model

from carryall.proto import kv_pb2, kv_pb2_grpc
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.engine.kv.tiers.served_store import ServedStore
from carryall.runtime.engine.requests.prefill_client import PREFILL_KEY_VARIABLE
from carryall.runtime.service.http.prefill import PrefillService
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT = [7 * n % 250 for n in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SECONDS = 20.0  # instead of what the null provider would need


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_KV_KEY", "a key of 16 or more characters")
    monkeypatch.delenv(PREFILL_KEY_VARIABLE, raising=False)


def open_llm(url: str | None, server: str | None = None) -> AsyncLLM:
    model = null_model()
    model.identity = "toy"
    return AsyncLLM(model, engine_config=EngineConfig(prefix_cache_url=url, prefill_server=server))


@asynccontextmanager
async def prefilling(**config: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A prefill server with a store of its own, over HTTP and gRPC."""
    llm = open_llm("serve://1GB")
    try:
        parts = [lambda models, settings: PrefillService()]
        async with http_serving(llm, parts=parts, **config) as http, serving(llm, **config) as served:
            yield http, served
    finally:
        await asyncio.to_thread(llm.shutdown)


async def decoded(url: str | None, server: str | None) -> tuple[list[int], int, int]:
    """Return the tokens of an answer, how many prompts were computed elsewhere, and the cached tokens."""
    llm = open_llm(url, server)
    llm.engine._prefills._local_seconds = lambda tokens: SECONDS
    try:
        outputs = [output async for output in llm.generate(PROMPT, GREEDY)]
        metrics = outputs[-1].metrics
        assert metrics
        return outputs[-1].outputs[0].token_ids, llm.stats().prefills_remote, metrics.cached_tokens
    finally:
        await asyncio.to_thread(llm.shutdown)


def test_kv_comes_directly_from_the_prefill_server() -> None:
    async def scenario() -> None:
        async with prefilling() as (http, served):
            tokens, remote, cached = await decoded(f"grpc://{served.address}", http.url)
        assert (remote, cached) == (1, 256)
        assert tokens == (await decoded(None, None))[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(("sent", "cached"), [("alice-key", 256), ("other", 0)])
def test_it_asks_for_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str, cached: int) -> None:
    monkeypatch.setenv(PREFILL_KEY_VARIABLE, sent)

    async def scenario() -> None:
        async with prefilling(api_keys=key_file(tmp_path, alice="")) as (http, served):
            found = await decoded(f"grpc://{served.address}", http.url)
        assert found[2] == cached
        assert found[0] == (await decoded(None, None))[0]

    asyncio.run(scenario())


def test_a_server_that_ends_before_its_kv_is_read_costs_a_computation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store is on a port where nobody listens any longer."""

    async def scenario() -> None:
        async with prefilling() as (http, _):
            async with prefilling() as (_, other):
                gone = other.address
            tokens, remote, cached = await decoded(f"grpc://{gone}", http.url)
        assert (remote, cached) == (1, 0)
        assert tokens == (await decoded(None, None))[0]

    asyncio.run(scenario())
    (line,) = [message for message in caplog.messages if "is not asked" in message]
    assert "ConnectionError: UNAVAILABLE: " in line
    assert "\n" not in line


def test_chunks_come_in_pieces_and_what_is_missing_is_named() -> None:
    async def scenario() -> None:
        async with prefilling() as (_, served), grpc.aio.insecure_channel(served.address) as channel:
            stub: Any = kv_pb2_grpc.ChunkServiceStub(channel)  # type: ignore[no-untyped-call]
            (model,) = [await served.models.version(served.models.find(None))]
            store = model.language_model(None).llm.engine.chunk_store
            assert isinstance(store, ServedStore)
            content = bytes(range(256)) * 12_000
            store.put("large", content)
            pieces = [
                piece.content for piece in await read(stub.ReadChunk(kv_pb2.ReadChunkRequest(name="large")))
            ]
            assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, len(content) - (2 << 20)]
            assert b"".join(pieces) == content
            found = await stub.FindChunks(kv_pb2.FindChunksRequest(names=["large", "none", "large"]))
            assert list(found.found) == [True, False, True]
            code, _ = await code_of(read(stub.ReadChunk(kv_pb2.ReadChunkRequest(name="none"))))
            assert code is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_a_service_without_a_store_says_so() -> None:
    async def scenario() -> None:
        async with (
            null_llm() as llm,
            serving(llm) as served,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            stub: Any = kv_pb2_grpc.ChunkServiceStub(channel)  # type: ignore[no-untyped-call]
            code, text = await code_of(stub.FindChunks(kv_pb2.FindChunksRequest(names=["a"])))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "--prefix-cache-url serve://4GB" in text

    asyncio.run(scenario())
