"""A thread that is killed at its work fails that work alone, or ends its part with an error; nobody hangs.

A killed thread gets an exception that no code expects; the next use gives what an undisturbed one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import batch_kit
import numpy as np
import onnx_ir as ir
import pytest
from faults import killed_in
from http_serving import http_serving
from llm_kit import toy_model

from carryall import InferenceSession
from carryall.errors import CarryallError, EngineClosedError, ProviderRuntimeError
from carryall.providers.targets.null import NullRunner
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.dynamic_batching import DynamicBatcher
from carryall.runtime.api.requests import RequestFactory
from carryall.runtime.batch import run as batch_run
from carryall.runtime.batch.jobs.journal import Journal
from carryall.runtime.engine.kv.tiers import disk
from carryall.runtime.engine.kv.tiers.disk import DiskTier
from carryall.runtime.text.grammars import GrammarMatcher
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAILED = "finish_reason is error"
LONG = "p" * 20_000  # tokenized in a thread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def within(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def text(llm: AsyncLLM, prompt: str = "p", params: SamplingParams = GREEDY) -> str:
    *_, last = [output async for output in llm.generate(prompt, params)]
    return FAILED if last.outputs[0].finish_reason == "error" else last.outputs[0].text


def test_the_engine_s_thread(tmp_path: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path))
        with killed_in("carryall-engine", NullRunner, "forward"):
            readers = await asyncio.gather(*(text(llm) for _ in range(3)), return_exceptions=True)
        assert [type(reader) for reader in readers] == [EngineClosedError] * 3
        with pytest.raises(EngineClosedError, match="the engine failed: Killed"):
            await text(llm)
        llm.shutdown()
        other = AsyncLLM(toy_model(tmp_path))
        assert len(await text(other)) > 0
        other.shutdown()

    within(test)


def test_a_thread_that_tokenizes(tmp_path: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path, context_length=30_000))
        expected = await text(llm, LONG)
        for _ in range(6):  # more often than there are such threads
            with killed_in("carryall-text", RequestFactory, "group"):
                with pytest.raises(CarryallError, match="ended"):
                    await text(llm, LONG)
                assert await text(llm)
        assert await text(llm, LONG) == expected
        llm.shutdown()

    within(test)


def test_a_thread_that_computes_masks(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="[ab]{4}"), seed=1)

    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path))
        expected = await text(llm, "p", params)
        for _ in range(6):
            with killed_in("carryall-mask", GrammarMatcher, "_fill"):
                found = await text(llm, "p", params)
            assert found in (expected, FAILED)  # a mask that is not needed may be lost
        assert await text(llm, "p", params) == expected
        llm.shutdown()

    within(test)


def test_a_service_whose_engine_s_thread_is_killed_is_not_ready(tmp_path: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path))
        async with http_serving(llm) as served:
            body = {"model": "toy", "prompt": "p", "max_tokens": 4}
            assert (await served.client.get("/health")).status_code == 200
            with killed_in("carryall-engine", NullRunner, "forward"):
                answer = await served.post("/v1/completions", **body)
            assert answer.status_code == 503
            assert "Killed" in answer.json()["error"]["message"]
            assert (await served.client.get("/health")).status_code == 503
            assert (await served.post("/v1/completions", **body)).status_code == 503

    within(test)


def test_a_service_whose_tokenizing_thread_is_killed_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(toy_model(tmp_path, context_length=30_000))
        async with http_serving(llm) as served:
            body = {"model": "toy", "prompt": LONG, "max_tokens": 4, "temperature": 0}
            expected = (await served.post("/v1/completions", **body)).json()["choices"]
            with killed_in("carryall-text", RequestFactory, "group"):
                answer = await served.post("/v1/completions", **body)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"]
            assert (await served.post("/v1/completions", **body)).json()["choices"] == expected

    within(test)


def test_the_thread_that_writes_kv_files(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10**6, b"s" * 32)
    with killed_in("carryall-kv-files", disk, "write_chunk"):
        for number in range(3):
            tier.put(bytes([number]) * 32, [np.arange(4, dtype=np.int32)])
        tier.flush()
    assert "Killed" in tier.disabled
    assert tier.given_up == 3
    tier.put(b"x" * 32, [np.arange(4, dtype=np.int32)], wait=True)
    tier.close()
    assert not list(tmp_path.rglob("*.kv"))
    other = DiskTier(tmp_path, 10**6, b"s" * 32)
    other.put(b"x" * 32, [np.arange(4, dtype=np.int32)])
    other.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 1


@pytest.mark.parametrize(
    ("thread", "owner", "name"),
    [
        ("carryall-batch-writer", Journal, "commit"),
        ("carryall-batch-reader", batch_run, "parse_row"),
    ],
)
def test_a_thread_of_a_batch_job(thread: str, owner: Any, name: str, tmp_path: Path) -> None:
    source = batch_kit.write_lines(tmp_path / "in.jsonl", ({"prompt": f"p{n}"} for n in range(5)))
    job, twin = (batch_kit.spec(source, tmp_path / f"{n}.jsonl") for n in "ab")
    with killed_in(thread, owner, name), pytest.raises(CarryallError, match="was ended by Killed"):
        batch_kit.run(job)
    assert not (tmp_path / "a.jsonl").exists()
    batch_kit.run(job)
    batch_kit.run(twin)
    found, expected = (batch_kit.read_lines(tmp_path / f"{n}.jsonl") for n in "ab")
    assert [line["response"]["body"]["choices"] for line in found] == [
        line["response"]["body"]["choices"] for line in expected
    ]


SUM = """
<ir_version: 10, opset_import: ["" : 21]>
sums (float[n] a, float[n] b) => (float[n] total) { total = Add(a, b) }
"""


def test_the_thread_of_a_batcher() -> None:
    ones = np.ones(1, np.float32)
    session = InferenceSession(ir.from_onnx_text(SUM), providers=["cpu"])
    with DynamicBatcher(session) as batcher:
        refused = pytest.raises(ProviderRuntimeError, match="Killed")
        with killed_in("carryall-batcher", InferenceSession, "run"), refused:
            batcher.submit({"a": ones, "b": ones}).result(30)
        assert batcher.submit({"a": ones, "b": ones}).result(30)["total"] == 2
