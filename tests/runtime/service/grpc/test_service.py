"""Every method of `carryall.v1.GenerationService` over a real socket, held against the engine itself."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast, get_args

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_serving import Served, code_of, read, serving
from null_llm import null_llm
from tensor_models import mixed_repository, sum_model
from tiny_models import write_tiny

from carryall.proto import generation_pb2, models_pb2, sampling_pb2, tasks_pb2
from carryall.proto.models_pb2 import (
    MODEL_STATE_READY,
    MODEL_STATE_UNLOADED,
    GetStatsRequest,
    ListModelsRequest,
    LoadModelRequest,
    UnloadModelRequest,
)
from carryall.proto.tasks_pb2 import (
    DetokenizeRequest,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.scoring import ContinuationScore
from carryall.runtime.engine.stats import EngineStats
from carryall.runtime.service.core.model_entry import ModelKind, ModelState
from carryall.runtime.service.grpc.service import KINDS, STATES

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def run(scenario: Callable[[AsyncLLM, Served], Awaitable[None]], **options: Any) -> None:
    async def test() -> None:
        async with null_llm(**options) as llm, serving(llm) as served:
            await scenario(llm, served)

    asyncio.run(test())


def test_tokens_and_text() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        expected = llm.encode("def f(x):")
        answer = await served.stub.Tokenize(TokenizeRequest(model="toy", text="def f(x):"))
        assert (answer.model, list(answer.token_ids), answer.context_length) == ("toy", expected, 4096)
        messages = [{"role": "user", "content": "Hi"}]
        talk = await served.stub.Tokenize(TokenizeRequest(conversation={"messages": messages}))
        assert list(talk.token_ids) == llm.encode("[user]Hi", add_special_tokens=False)
        text = await served.stub.Detokenize(DetokenizeRequest(token_ids=expected))
        assert text.text == "def f(x):"
        for request in (TokenizeRequest(), DetokenizeRequest(token_ids=[10**6])):
            method = served.stub.Tokenize if isinstance(request, TokenizeRequest) else served.stub.Detokenize
            assert (await code_of(method(request)))[0] == INVALID

    run(scenario)


def test_scores_are_the_engines() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        pairs = [("def f(x):", " return x"), ("import", " numpy as np")]
        expected = await llm.score(*map(list, zip(*pairs, strict=True)))
        inputs = [tasks_pb2.ScoreInput(text=text, continuation=end) for text, end in pairs]
        answer = await served.stub.Score(ScoreRequest(inputs=inputs))
        assert expected == [
            ContinuationScore(score.logprob, list(score.token_ids), list(score.token_logprobs), score.greedy)
            for score in answer.scores
        ]
        code, details = await code_of(served.stub.Score(ScoreRequest(inputs=[{"text": "a"}])))
        assert (code, "neither may be empty" in details) == (INVALID, True), details

    run(scenario)


def test_documents_are_ranked() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        documents = ["one", "two", "three"]
        scores = await llm.rerank("which", documents)
        answer = await served.stub.Rerank(RerankRequest(query="which", documents=documents, top_n=2))
        assert [(d.index, d.score) for d in answer.documents] == sorted(
            enumerate(scores), key=lambda pair: -pair[1]
        )[:2]

    run(scenario)


def test_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    checkpoint = write_tiny("llama", tmp_path / "tiny")

    async def scenario() -> None:
        llm = AsyncLLM(checkpoint, max_slots=2, num_threads=1)
        try:
            async with serving(llm) as served:
                inputs = [{"token_ids": {"ids": ids}} for ids in ([4, 5], [1, 2, 3])]
                request = EmbedRequest(inputs=inputs, pooling="POOLING_MEAN", normalize=False)
                answer = await served.stub.Embed(request)
                expected = await llm.embed([[4, 5], [1, 2, 3]], pooling="mean", normalize=False)
                found = np.array([list(vector.values) for vector in answer.embeddings], np.float32)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
                assert answer.usage.prompt_tokens == 5
                unit = await served.stub.Embed(EmbedRequest(inputs=inputs))
                lengths = [np.linalg.norm(vector.values) for vector in unit.embeddings]
                assert lengths == pytest.approx([1.0, 1.0])
                for bad in (EmbedRequest(inputs=[{}]), EmbedRequest(inputs=inputs, pooling=cast("Any", 9))):
                    assert (await code_of(served.stub.Embed(bad)))[0] == INVALID
        finally:
            llm.shutdown()

    asyncio.run(scenario())


def test_a_task_that_the_model_lacks_is_unimplemented() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        code, details = await code_of(served.stub.Embed(EmbedRequest(inputs=[{"text": "a"}])))
        assert (code, "cannot return hidden states" in details) == (grpc.StatusCode.UNIMPLEMENTED, True), (
            details
        )

    run(scenario)


def test_models_come_and_go() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        stub = served.stub
        (model,) = (await stub.ListModels(ListModelsRequest())).models
        assert (model.name, model.state, model.provider) == ("toy", MODEL_STATE_READY, "null")
        assert (await stub.LoadModel(LoadModelRequest(model="toy"))).model == model
        await stub.UnloadModel(UnloadModelRequest(model="toy"))
        (model,) = (await stub.ListModels(ListModelsRequest())).models
        assert (model.state, model.provider) == (MODEL_STATE_UNLOADED, "")
        code, details = await code_of(read(stub.Generate(generation_pb2.GenerateRequest(text="x"))))
        assert (code, "not loaded" in details) == (grpc.StatusCode.UNAVAILABLE, True), details

    run(scenario)


def test_tensor_models_are_listed_and_have_no_text() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(llm, mixed_repository(llm, {"sum": sum_model()})) as served:
            models = (await served.stub.ListModels(ListModelsRequest())).models
            kinds = [(one.name, one.kind, one.version, one.state) for one in models]
            assert kinds == [
                ("sum", models_pb2.MODEL_KIND_TENSOR, "1", MODEL_STATE_READY),
                ("toy", models_pb2.MODEL_KIND_LANGUAGE, "1", MODEL_STATE_READY),
            ]
            code, details = await code_of(served.stub.Tokenize(TokenizeRequest(model="sum", text="x")))
            assert (code, "a tensor model" in details) == (grpc.StatusCode.UNIMPLEMENTED, True), details
            assert [one.model for one in (await served.stub.GetStats(GetStatsRequest())).models] == ["toy"]
            code, _ = await code_of(served.stub.GetStats(GetStatsRequest(model="sum")))
            assert code == grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


def test_every_state_and_kind_has_a_value() -> None:
    assert set(STATES) == set(get_args(ModelState))
    assert set(KINDS) == set(get_args(ModelKind))


@pytest.mark.parametrize("name", ["", "other"])
def test_only_a_named_model_is_loaded_or_unloaded(name: str) -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        for call in (
            served.stub.LoadModel(LoadModelRequest(model=name)),
            served.stub.UnloadModel(UnloadModelRequest(model=name)),
        ):
            code, details = await code_of(call)
            assert (code, "there are: toy" in details) == (grpc.StatusCode.NOT_FOUND, True), details

    run(scenario)


def test_an_unknown_model_is_not_found() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        stub = served.stub
        calls = [
            read(stub.Generate(generation_pb2.GenerateRequest(model="no", text="x"))),
            read(stub.Chat(generation_pb2.ChatRequest(model="no"))),
            stub.Embed(EmbedRequest(model="no")),
            stub.Score(ScoreRequest(model="no")),
            stub.Rerank(RerankRequest(model="no")),
            stub.Tokenize(TokenizeRequest(model="no")),
            stub.Detokenize(DetokenizeRequest(model="no")),
            stub.GetStats(GetStatsRequest(model="no")),
        ]
        for call in calls:
            assert (await code_of(call))[0] == grpc.StatusCode.NOT_FOUND

    run(scenario)


def test_stats_are_the_engines() -> None:
    assert {field.name for field in models_pb2.EngineStats.DESCRIPTOR.fields} == {
        "model",
        *(field.name for field in dataclasses.fields(EngineStats)),
    }

    async def scenario(llm: AsyncLLM, served: Served) -> None:
        sampling = sampling_pb2.SamplingOptions(max_tokens=5, ignore_eos=True)
        await read(served.stub.Generate(generation_pb2.GenerateRequest(text="x", sampling=sampling)))
        (stats,) = (await served.stub.GetStats(GetStatsRequest())).models
        assert (stats.model, stats.generated_tokens, stats.finished, stats.slots) == ("toy", 5, 1, 4)
        assert not stats.HasField("kv_bytes_budget")

    run(scenario)


async def details_of(call: Any) -> tuple[status_pb2.Status, dict[str, str]]:
    """The rich status of a call that fails, and its trailing metadata."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata())
    return status_pb2.Status.FromString(metadata["grpc-status-details-bin"]), metadata


def test_a_fault_names_the_field() -> None:
    async def scenario(llm: AsyncLLM, served: Served) -> None:
        request = generation_pb2.GenerateRequest(text="x", sampling={"top_p": 2})
        status, metadata = await details_of(read(served.stub.Generate(request)))
        detail = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(detail)
        (violation,) = detail.field_violations
        assert (violation.field, "top_p must be a number" in violation.description) == ("sampling", True)
        assert (status.code, status.message) == (INVALID.value[0], violation.description)
        assert "grpc-retry-pushback-ms" not in metadata

    run(scenario)


def test_a_retry_is_told_when() -> None:
    async def scenario() -> None:
        async with serving(None) as served:
            status, metadata = await details_of(served.stub.GetStats(GetStatsRequest(model="toy")))
            detail = error_details_pb2.RetryInfo()
            assert status.details[0].Unpack(detail)
            assert (detail.retry_delay.seconds, metadata["grpc-retry-pushback-ms"]) == (1, "1000")

    asyncio.run(scenario())


def test_a_fault_of_ours_is_internal_and_tells_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("secret")

    async def scenario(llm: AsyncLLM, served: Served) -> None:
        monkeypatch.setattr(AsyncLLM, "token_ids", fail)
        code, details = await code_of(served.stub.Tokenize(TokenizeRequest(text="x")))
        assert (code, "secret" in details) == (grpc.StatusCode.INTERNAL, False), details

    run(scenario)
