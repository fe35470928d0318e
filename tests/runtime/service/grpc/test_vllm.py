"""`vllm.grpc.engine.VllmEngine` over a real socket, held against the engine itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from api_keys import key_file
from grpc_serving import Served, code_of, read, serving
from null_llm import null_llm
from tiny_models import write_tiny

from carryall.proto import vllm_engine_pb2 as pb
from carryall.proto import vllm_engine_pb2_grpc
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.grpc.vllm_messages import sampling_params
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY: Any = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "skip_special_tokens": True}


def run(scenario: Callable[[Any, AsyncLLM], Awaitable[None]], llm: Any = None) -> None:
    async def test() -> None:
        async with null_llm(step_seconds=0.005) as llm, serving(llm) as served, channel_of(served) as channel:
            await scenario(vllm_engine_pb2_grpc.VllmEngineStub(channel), llm)  # type: ignore[no-untyped-call]

    asyncio.run(test())


def channel_of(served: Served) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(served.address)


def ask(token_ids: list[int], stream: bool = False, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        tokenized={"input_ids": token_ids},
        sampling_params={**GREEDY, **sampling},
        stream=stream,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_tokens_out(stream: bool) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        tokens = llm.encode("def f(x):")
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, n=2, logprobs=2, prompt_logprobs=1
        )
        *_, expected = [output async for output in llm.generate(tokens, params)]
        request = ask(tokens, stream, n=2, logprobs=2, prompt_logprobs=1)
        responses = await read(stub.Generate(request))
        chunks = [one.chunk for one in responses if one.HasField("chunk")]
        ends = {one.complete.index: one.complete for one in responses if one.HasField("complete")}
        assert bool(chunks) == stream
        for output in expected.outputs:
            end = ends[output.index]
            assert list(end.output_ids) == output.token_ids
            assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(tokens), 8)
            assert output.logprobs is not None
            own = [
                entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)
            ]
            np.testing.assert_allclose(end.output_logprobs.token_logprobs, own, rtol=1e-6)
            assert [len(top.values) for top in end.output_logprobs.top_logprobs] == [2] * 8
            if stream:
                parts = [chunk for chunk in chunks if chunk.index == output.index]
                assert [token for part in parts for token in part.token_ids] == output.token_ids
                assert [len(part.output_logprobs.token_ids) for part in parts] == [
                    len(p.token_ids) for p in parts
                ]
        first = (chunks or [ends[0]])[0].input_logprobs
        assert list(first.token_ids) == tokens
        assert [one.HasField("value") for one in first.token_logprobs] == [False] + [True] * (len(tokens) - 1)

    run(scenario)


def test_a_stop_is_named() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        (whole,) = await read(stub.Generate(ask(llm.encode("x"))))
        stopping = ask(llm.encode("x"), stop_token_ids=[whole.complete.output_ids[3]])
        (stopped,) = await read(stub.Generate(stopping))
        assert stopped.complete.finish_reason == "stop"
        assert stopped.complete.matched_token_id in whole.complete.output_ids

    run(scenario)


def test_a_request_can_be_aborted() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        call = stub.Generate(ask(llm.encode("x"), stream=True, max_tokens=4000))
        await call.read()
        await stub.Abort(pb.AbortRequest(request_ids=["r", "unknown"]))
        *_, last = await read(call)
        assert last.complete.finish_reason == "abort"

    run(scenario)


def test_a_key_cannot_abort_the_requests_of_another(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="", mallory="")
    alice, mallory = ((("x-api-key", f"{name}-key"),) for name in ("alice", "mallory"))

    async def scenario() -> None:
        async with (
            null_llm(step_seconds=0.005) as llm,
            serving(llm, api_keys=keys) as served,
            channel_of(served) as channel,
        ):
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(ask(llm.encode("x"), stream=True, max_tokens=4000), metadata=alice)
            await call.read()
            await stub.Abort(pb.AbortRequest(request_ids=["r"]), metadata=mallory)
            for _ in range(20):
                assert (await call.read()).HasField("chunk")
            await stub.Abort(pb.AbortRequest(request_ids=["r"]), metadata=alice)
            *_, last = await read(call)
            assert last.complete.finish_reason == "abort"

    asyncio.run(scenario())


def test_facts() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.is_generation, info.max_context_length) == ("toy", True, 4096)
        assert json.loads(info.default_sampling_params_json) == {}
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.max_num_seqs, server.data_parallel_size) == (0, 4, 1)
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_total_reqs, load.max_running_requests) == (0, 4)

    run(scenario)


def test_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny("llama", tmp_path / "tiny")

    async def scenario() -> None:
        llm = AsyncLLM(checkpoint, max_slots=2, num_threads=1)
        try:
            async with serving(llm) as served, channel_of(served) as channel:
                stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)  # type: ignore[no-untyped-call]
                answer = await stub.Embed(pb.EmbedRequest(tokenized={"input_ids": [1, 2, 3]}))
                expected = (await llm.embed([[1, 2, 3]]))[0]
                np.testing.assert_allclose(answer.embedding, expected, rtol=0, atol=1e-6)
                assert (answer.prompt_tokens, answer.embedding_dim) == (3, len(answer.embedding))
        finally:
            llm.shutdown()

    asyncio.run(scenario())


def test_options() -> None:
    assert sampling_params(pb.SamplingParams(skip_special_tokens=True)) == SamplingParams(max_tokens=None)
    read_ = sampling_params(
        pb.SamplingParams(
            temperature=0.5,
            top_k=3,
            max_tokens=4,
            n=2,
            stop=["a"],
            stop_token_ids=[7],
            logit_bias={3: 1.0},
            choice={"choices": ["a", "b"]},
        )
    )
    assert read_ == SamplingParams.from_dict(
        {
            "temperature": 0.5,
            "top_k": 3,
            "max_tokens": 4,
            "n": 2,
            "stop": ["a"],
            "stop_token_ids": [7],
            "logit_bias": {3: 1.0},
            "structured_output": {"choice": ["a", "b"]},
            "skip_special_tokens": False,
        }
    )


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT"),
        (ask([]), "INVALID_ARGUMENT"),
        (ask([1], top_p=2), "INVALID_ARGUMENT"),
        (ask([1], logprobs=-1), "INVALID_ARGUMENT"),
        (ask([1], structural_tag="{}"), "UNIMPLEMENTED"),
        (ask([1], truncate_prompt_tokens=3), "UNIMPLEMENTED"),
        (pb.GenerateRequest(text="x", mm_inputs={}), "UNIMPLEMENTED"),
        (pb.GenerateRequest(text="x", media_refs={}), "UNIMPLEMENTED"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "UNIMPLEMENTED"),
        (pb.GenerateRequest(text="x", data_parallel_rank=1), "UNIMPLEMENTED"),
    ],
)
def test_unsupported_requests_are_reported(request_: pb.GenerateRequest, code: str) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        assert (await code_of(read(stub.Generate(request_))))[0] == grpc.StatusCode[code]

    run(scenario)
