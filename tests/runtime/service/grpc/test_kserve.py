"""The Open Inference Protocol over gRPC: tensors, language models, facts, faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import onnx_ir as ir
import pytest
from grpc_serving import code_of, serving
from null_llm import null_llm
from tensor_models import SAMPLES, echo_model, mixed_repository, sum_model

from carryall.proto import kserve_pb2 as pb
from carryall.proto import kserve_pb2_grpc
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.kserve.tensors import TYPES, from_raw, to_raw
from carryall.runtime.types.sampling_params import SamplingParams

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def stub_of(models: Callable[[AsyncLLM], Any], **options: Any) -> AsyncIterator[tuple[Any, AsyncLLM]]:
    async with (
        null_llm(step_seconds=0.005) as llm,
        serving(llm, models(llm), **options) as served,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield kserve_pb2_grpc.GRPCInferenceServiceStub(channel), llm  # type: ignore[no-untyped-call]


def run(scenario: Callable[[Any, AsyncLLM], Awaitable[None]], **sessions: Any) -> None:
    async def test() -> None:
        async with stub_of(lambda llm: mixed_repository(llm, sessions)) as (stub, llm):
            await scenario(stub, llm)

    asyncio.run(test())


def raw_request(model: str, arrays: dict[str, tuple[str, Any]], **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    for name, (datatype, array) in arrays.items():
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(to_raw(array))
    return request


def outputs_of(response: pb.ModelInferResponse) -> dict[str, Any]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {one.name: from_raw(one.name, one.datatype, one.shape, data) for one, data in pairs}


INTEGERS = [f"{sign}INT{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64)]
KINDS = [ir.DataType[name] for name in ("BOOL", *INTEGERS, "FLOAT16", "FLOAT", "DOUBLE")]


def test_every_type_passes_raw_and_typed() -> None:
    names = [name for name in TYPES if name not in ("BF16", "BYTES")]

    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        arrays = {f"INPUT{i}": (name, SAMPLES[name]) for i, name in enumerate(names)}
        raw = await stub.ModelInfer(raw_request("echo", arrays, id="a"))
        assert (raw.model_name, raw.model_version, raw.id) == ("echo", "1", "a")
        found = outputs_of(raw)
        for i, name in enumerate(names):
            np.testing.assert_array_equal(found[f"OUTPUT{i}"], SAMPLES[name])
            assert raw.outputs[i].datatype == name
        typed = [name for name in names if TYPES[name].contents]
        request = pb.ModelInferRequest(model_name="typed")
        for i, name in enumerate(typed):
            tensor = request.inputs.add(name=f"INPUT{i}", datatype=name, shape=[1, 2])
            getattr(tensor.contents, str(TYPES[name].contents)).extend(SAMPLES[name].ravel().tolist())
        response = await stub.ModelInfer(request)
        assert not response.raw_output_contents
        for i, name in enumerate(typed):
            contents = getattr(response.outputs[i].contents, str(TYPES[name].contents))
            assert list(contents) == SAMPLES[name].ravel().tolist()

    without_half = [kind for kind in KINDS if kind != ir.DataType.FLOAT16]
    run(scenario, echo=echo_model(*KINDS), typed=echo_model(*without_half))


def test_texts_and_bfloat16_pass() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        for model, name in (("texts", "BYTES"), ("brain", "BF16")):
            answer = await stub.ModelInfer(raw_request(model, {"INPUT0": (name, SAMPLES[name])}))
            found = outputs_of(answer)["OUTPUT0"]
            assert (answer.outputs[0].datatype, found.dtype) == (name, SAMPLES[name].dtype)
            np.testing.assert_array_equal(found, SAMPLES[name])
        bad = raw_request("texts", {"INPUT0": ("BYTES", np.array([[b"\xff", b""]], object))})
        assert (await code_of(stub.ModelInfer(bad)))[0] == INVALID

    run(scenario, texts=echo_model(ir.DataType.STRING), brain=echo_model(ir.DataType.BFLOAT16))


def test_a_model_computes_what_is_wanted() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 4), np.float32) for _ in range(2))

    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        request = raw_request("sum", {"A": ("FP32", a), "B": ("FP32", b)}, outputs=[{"name": "SUM"}])
        np.testing.assert_array_equal(outputs_of(await stub.ModelInfer(request))["SUM"], a + b)
        stats = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="sum"))).model_stats[0]
        assert (stats.inference_count, stats.execution_count) == (3, 1)
        assert stats.inference_stats.success.count == 1
        assert stats.inference_stats.success.ns > 0
        (batch,) = stats.batch_stats
        assert (batch.batch_size, batch.compute_infer) == (3, stats.inference_stats.compute_infer)
        assert batch.compute_infer.count == batch.compute_input.count == batch.compute_output.count == 1

    run(scenario, sum=sum_model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": "no"}, "there is no model 'no'"),
        ({"model_version": "7"}, "version 7"),
        ({"outputs": [{"name": "X"}]}, "unknown output 'X'"),
        ({"raw_input_contents": [b"", b""]}, "has 16 bytes, not 0"),
        ({"raw_input_contents": [b"", b"", b""]}, "has 16 bytes"),
        ({"raw_input_contents": [bytes(16)]}, "no entry for input 'B'"),
        ({"raw_input_contents": [bytes(16)] * 3}, "more entries"),
        ({"inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 4]}] * 2}, "given twice"),
        ({"inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 4]}]}, "more entries"),
        (
            {
                "inputs": [{"name": n, "datatype": "INT32", "shape": [1, 4]} for n in "AB"],
            },
            "the run failed",
        ),
        (
            {
                "inputs": [
                    {"name": "A", "datatype": "FP32", "shape": [1, 4], "contents": {"fp32_contents": [1] * 4}}
                ]
            },
            "though raw_input_contents is given",
        ),
    ],
)
def test_a_request_at_fault_is_refused(change: dict[str, Any], message: str) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        array = np.ones((1, 4), np.float32)
        request = raw_request("sum", {"A": ("FP32", array), "B": ("FP32", array)})
        for field, value in change.items():
            request.ClearField(field)
            request.MergeFrom(pb.ModelInferRequest(**{field: value}))
        code, details = await code_of(stub.ModelInfer(request))
        expected = grpc.StatusCode.NOT_FOUND if message.startswith(("there", "version")) else INVALID
        assert (code, message in details) == (expected, True), details

    run(scenario, sum=sum_model())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"datatype": "FP16", "contents": {}}, "is supported in raw_input_contents only"),
        ({"datatype": "FP32", "contents": {"int_contents": [1]}}, "belongs in fp32_contents"),
        ({"datatype": "FP32", "contents": {"fp32_contents": [1]}}, "has 2 elements, not 1"),
        ({"datatype": "FP9", "contents": {}}, "unknown datatype 'FP9'"),
        (
            {"datatype": "FP32", "parameters": {"shared_memory_region": {"string_param": "x"}}},
            "no shared memory region 'x'",
        ),
    ],
)
def test_typed_tensors_at_fault_are_refused(tensor: dict[str, Any], message: str) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        request = pb.ModelInferRequest(
            model_name="echo", inputs=[{"name": "INPUT0", "shape": [1, 2], **tensor}]
        )
        code, details = await code_of(stub.ModelInfer(request))
        assert (code, message in details) == (INVALID, True), details

    run(scenario, echo=echo_model(ir.DataType.FLOAT))


def text_request(text: str, sampling: dict[str, Any] | None = None, **flags: bool) -> pb.ModelInferRequest:
    arrays: dict[str, tuple[str, Any]] = {"text_input": ("BYTES", np.array([text.encode()], object))}
    if sampling is not None:
        arrays["sampling_parameters"] = ("BYTES", np.array([json.dumps(sampling).encode()], object))
    for name, value in flags.items():
        arrays[name] = ("BOOL", np.array([value]))
    return raw_request("toy", arrays, id="r")


async def whole(llm: AsyncLLM, text: str, **options: Any) -> Any:
    params = SamplingParams(**{**GREEDY, **options})
    return [output async for output in llm.generate(text, params)][-1]


def test_a_text_at_once() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        expected = await whole(llm, "def f(x):", n=2, logprobs=0)
        flags = {
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_cumulative_logprob": True,
            "return_logprobs": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        found = outputs_of(await stub.ModelInfer(text_request("def f(x):", {**GREEDY, "n": 2}, **flags)))
        assert found["text_output"].tolist() == [one.text.encode() for one in expected.outputs]
        assert found["finish_reason"].tolist() == [b"length"] * 2
        assert found["num_input_tokens"].tolist() == [len(expected.prompt_token_ids)]
        assert found["num_output_tokens"].tolist() == [8, 8]
        entries = [json.loads(one) for one in found["logprobs"].tolist()]
        tokens = expected.outputs[0].token_ids
        own = [entries[0][i][str(token)]["logprob"] for i, token in enumerate(tokens)]
        assert found["cumulative_logprob"][0] == pytest.approx(sum(own), rel=1e-6)
        with_input = outputs_of(await stub.ModelInfer(text_request("def f(x):", GREEDY)))
        assert with_input["text_output"].tolist() == [f"def f(x):{expected.outputs[0].text}".encode()]

    run(scenario)


def test_options_may_be_parameters() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        expected = await whole(llm, "x", max_tokens=5)
        request = text_request("x", exclude_input_in_output=True)
        request.parameters["max_tokens"].int64_param = 5
        request.parameters["temperature"].double_param = 0.0
        request.parameters["ignore_eos"].bool_param = True
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        request.parameters["priority"].uint64_param = 3
        found = outputs_of(await stub.ModelInfer(request))
        assert found["text_output"].tolist() == [expected.outputs[0].text.encode()]

    run(scenario)


def test_streams_of_one_call_are_told_apart_by_id() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        expected = {name: await whole(llm, name) for name in ("one", "two")}
        requests = [text_request(name, GREEDY, stream=True) for name in expected]
        for request, name in zip(requests, expected, strict=True):
            request.id = name
        bad = text_request("x", {"top_p": 2}, stream=True)
        bad.id = "bad"
        array = np.ones((1, 4), np.float32)
        tensors = raw_request("sum", {"A": ("FP32", array), "B": ("FP32", array)}, id="sum")
        texts: dict[str, list[bytes]] = {name: [] for name in expected}
        finals: dict[str, list[bool]] = {}
        errors = []
        async for message in stub.ModelStreamInfer(iter([*requests, bad, tensors])):
            response = message.infer_response
            finals.setdefault(response.id, []).append(response.parameters["triton_final_response"].bool_param)
            if message.error_message:
                errors.append((response.id, message.error_message))
            elif response.id == "sum":
                assert outputs_of(response)["SUM"].tolist() == [[2.0] * 4]
            else:
                texts[response.id] += outputs_of(response)["text_output"].tolist()
        for name, output in expected.items():
            assert b"".join(texts[name]).decode() == output.outputs[0].text
            assert len(texts[name]) > 1
        assert all(values[-1] and not any(values[:-1]) for values in finals.values())
        ((who, error),) = errors
        assert (who, "top_p must be a number" in error) == ("bad", True)

    run(scenario, sum=sum_model())


def test_an_abandoned_stream_frees_its_requests() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        endless = {**GREEDY, "max_tokens": 4000}
        call = stub.ModelStreamInfer(iter([text_request(str(n), endless, stream=True) for n in range(3)]))
        await call.read()
        call.cancel()
        async with asyncio.timeout(30):
            while llm.stats().running + llm.stats().waiting:
                await asyncio.sleep(0.005)
        assert llm.stats().cancelled == 3

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (text_request("x", stream=True), "ModelStreamInfer"),
        (text_request("x", {"n": 2}, stream=True), "'n' must be 1 in a stream"),
        (text_request("x", stream=True, exclude_input_in_output=False), "set exclude_input_in_output"),
        (text_request("x", {"top_q": 1}), "no option 'top_q'"),
        (
            raw_request("toy", {"sampling_parameters": ("BYTES", np.array([b"{"], object))}),
            "'text_input' is missing",
        ),
        (raw_request("toy", {"text_input": ("INT8", np.zeros(1, np.int8))}), "must be BYTES"),
        (raw_request("toy", {"text_input": ("BYTES", np.array([b"\xff"], object))}), "not UTF-8"),
        (raw_request("toy", {"text": ("BYTES", np.array([b"a"], object))}), "unknown input 'text'"),
        (raw_request("toy", {"text_input": ("BYTES", np.array([b"a", b"b"], object))}), "with one element"),
    ],
)
def test_a_text_request_at_fault_is_refused(request_: pb.ModelInferRequest, message: str) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        code, details = await code_of(stub.ModelInfer(request_))
        assert (code, message in details) == (INVALID, True), details

    run(scenario)


def test_facts() -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="toy"))).ready
        assert "statistics" in (await stub.ServerMetadata(pb.ServerMetadataRequest())).extensions
        facts = await stub.ModelMetadata(pb.ModelMetadataRequest(name="sum"))
        assert [(one.name, one.datatype, list(one.shape)) for one in facts.inputs] == [
            ("A", "FP32", [-1, 4]), ("B", "FP32", [-1, 4])
        ]  # fmt: skip
        text = await stub.ModelMetadata(pb.ModelMetadataRequest(name="toy"))
        assert (text.platform, text.inputs[0].name, text.outputs[0].datatype) == (
            "carryall_llm", "text_input", "BYTES"
        )  # fmt: skip
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="toy"))).config
        assert config.model_transaction_policy.decoupled
        assert (config.input[0].data_type, config.input[1].optional) == (pb.TYPE_STRING, True)
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [(one.name, one.version, one.state) for one in index.models] == [
            ("toy", "1", "READY"), ("sum", "1", "READY")
        ]  # fmt: skip
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="toy"))
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="toy"))).ready
        ready = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
        assert [one.name for one in ready.models] == ["sum"]
        assert (await code_of(stub.ModelMetadata(pb.ModelMetadataRequest(name="toy"))))[0] == (
            grpc.StatusCode.UNAVAILABLE
        )

    run(scenario, sum=sum_model())


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda stub: stub.ModelReady(pb.ModelReadyRequest(name="no")), "NOT_FOUND"),
        (lambda stub: stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest()), "NOT_FOUND"),
        (
            lambda stub: stub.RepositoryModelLoad(
                pb.RepositoryModelLoadRequest(
                    model_name="toy", parameters={"config": pb.ModelRepositoryParameter(string_param="{}")}
                )
            ),
            "UNIMPLEMENTED",
        ),
        (
            lambda stub: stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x")),
            "INVALID_ARGUMENT",
        ),
        (
            lambda stub: stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name="r", key="k", byte_size=1)
            ),
            "UNIMPLEMENTED",
        ),
    ],
)
def test_missing_models_and_versions_are_reported(call: Callable[[Any], Awaitable[Any]], code: str) -> None:
    async def scenario(stub: Any, llm: AsyncLLM) -> None:
        assert (await code_of(call(stub)))[0] == grpc.StatusCode[code]

    run(scenario)
