"""The Open Inference Protocol over HTTP: JSON and binary tensors, language models, facts, faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from tensor_models import SAMPLES, echo_model, mixed_repository, sum_model

from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.service.http import kserve
from carryall.runtime.service.http.kserve import JSON_SIZE
from carryall.runtime.service.kserve.documents import read_object
from carryall.runtime.service.kserve.tensors import TYPES, from_raw, to_raw
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY: Any = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def run(scenario: Callable[[HttpServed, AsyncLLM], Awaitable[None]], **sessions: Any) -> None:
    async def test() -> None:
        async with (
            null_llm(step_seconds=0.005) as llm,
            http_serving(llm, models=mixed_repository(llm, sessions)) as served,
        ):
            await scenario(served, llm)

    asyncio.run(test())


def tensor(name: str, datatype: str, array: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), **more}


def test_tensors_in_json() -> None:
    names = [name for name in TYPES if name not in ("BF16", "BYTES", "FP64", "FP32")]

    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        inputs = [
            tensor(f"INPUT{i}", name, SAMPLES[name], data=SAMPLES[name].tolist())
            for i, name in enumerate(names)
        ]
        answer = (await served.post("/v2/models/echo/infer", id="a", inputs=inputs)).json()
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("echo", "1", "a")
        for one, name in zip(answer["outputs"], names, strict=True):
            assert (one["datatype"], one["shape"]) == (name, [1, 2])
            assert one["data"] == SAMPLES[name].ravel().tolist()
        texts = [tensor("INPUT0", "BYTES", np.empty((1, 2)), data=["ä", ""])]
        answer = (await served.post("/v2/models/texts/versions/1/infer", inputs=texts)).json()
        assert answer["outputs"][0]["data"] == ["ä", ""]

    kinds = [ir.DataType[{"FP16": "FLOAT16"}.get(name, name)] for name in names]
    run(scenario, echo=echo_model(*kinds), texts=echo_model(ir.DataType.STRING))


def test_binary_tensors() -> None:
    a, b = np.arange(4, dtype=np.float32)[None], np.full((1, 4), np.inf, np.float32)

    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        def document(**more: Any) -> bytes:
            inputs = [
                tensor("A", "FP32", a, parameters={"binary_data_size": 16}),
                tensor("B", "FP32", b, data=[1, 2, 3, 4]),
            ]
            return json.dumps({"inputs": inputs, **more}).encode()

        async def post(text: bytes) -> Any:
            headers = {JSON_SIZE: str(len(text))}
            return await served.client.post("/v2/models/sum/infer", content=text + to_raw(a), headers=headers)

        plain = (await post(document())).json()
        assert plain["outputs"][0]["data"] == [1, 3, 5, 7]
        for text in (
            document(parameters={"binary_data_output": True}),
            document(outputs=[{"name": "SUM", "parameters": {"binary_data": True}}]),
        ):
            answer = await post(text)
            size = int(answer.headers[JSON_SIZE])
            head = json.loads(answer.content[:size])
            assert head["outputs"][0]["parameters"] == {"binary_data_size": 16}
            found = from_raw("SUM", "FP32", [1, 4], answer.content[size:])
            assert found.tolist() == [[1, 3, 5, 7]]

    run(scenario, sum=sum_model())


def test_numbers_that_are_not_finite_are_null() -> None:
    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        inputs = [
            tensor("A", "FP32", np.empty((1, 4)), data=[1e38, 1, 1, 1]),
            tensor("B", "FP32", np.empty((1, 4)), data=[3e38, 1, 1, 1]),
        ]
        answer = await served.post("/v2/models/sum/infer", inputs=inputs)
        assert answer.json()["outputs"][0]["data"] == [None, 2, 2, 2]

    run(scenario, sum=sum_model())


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "the inputs must be A, B"),
        ({"inputs": 1}, 400, "must be a list of objects"),
        ({"inputs": [{}]}, 400, "needs a 'name'"),
        ({"inputs": [{"name": "A"}]}, 400, "needs 'datatype' (a string) and 'shape'"),
        ({"inputs": [{"name": "A", "datatype": "FP32", "shape": [True]}]}, 400, "needs 'datatype'"),
        ({"inputs": [{"name": "A", "datatype": "FP32", "shape": [1]}]}, 400, "needs 'data'"),
        ({"inputs": [{"name": "A", "datatype": "FP32", "shape": [1], "data": ["x"]}]}, 400, "not FP32"),
        (
            {
                "inputs": [
                    {"name": "A", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
                ]
            },
            400,
            "has 4 bytes of binary data, but only 0 remain",
        ),
        (
            {"inputs": [{"name": "A", "datatype": "FP32", "shape": [1], "parameters": 1}]},
            400,
            "must be an object",
        ),
    ],
)
def test_a_request_at_fault_is_refused(body: dict[str, Any], status: int, message: str) -> None:
    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        answer = await served.post("/v2/models/sum/infer", **body)
        assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text

    run(scenario, sum=sum_model())


@pytest.mark.parametrize("header", ["-1", "x", "100"])
def test_a_header_that_lies_is_refused(header: str) -> None:
    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        answer = await served.client.post("/v2/models/sum/infer", content=b"{}", headers={JSON_SIZE: header})
        assert answer.status_code == 400, answer.text

    run(scenario, sum=sum_model())


@pytest.mark.parametrize(("stop", "reason"), [(None, "length"), ("e", "stop_sequence")])
def test_details_name_the_tokens_and_the_end(stop: str | None, reason: str) -> None:
    options = {**GREEDY, "stop": stop} if stop else GREEDY

    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        params = SamplingParams(**options, logprobs=0)
        *_, last = [output async for output in llm.generate("def f(x):", params)]
        expected = last.outputs[0]
        pairs = zip(expected.token_ids, expected.logprobs or [], strict=True)
        tokens = [
            {
                "id": token,
                "text": one[token].text,
                "logprob": pytest.approx(one[token].logprob),
                "special": False,
            }
            for token, one in pairs
        ]
        body = {"text_input": "def f(x):", "parameters": {**options, "details": True}}
        whole = (await served.post("/v2/models/toy/generate", **body)).json()
        assert whole["details"] == {"finish_reason": reason, "logprobs": tokens}
        events = await served.events("/v2/models/toy/generate_stream", **body)
        assert [one["details"]["token"] for one in events] == tokens
        assert [one["details"]["finish_reason"] for one in events] == [None] * (len(tokens) - 1) + [reason]
        assert "".join(one["text_output"] for one in events) == whole["text_output"] == expected.text

    run(scenario)


@pytest.mark.long
def test_text_at_once_and_as_it_grows() -> None:
    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        params = SamplingParams(**GREEDY)
        *_, expected = [output async for output in llm.generate("def f(x):", params)]
        text = expected.outputs[0].text
        bodies: list[dict[str, Any]] = [
            {"parameters": GREEDY},
            {"parameters": {**GREEDY, "stream": False}, "id": "a"},
            {"sampling_parameters": json.dumps(GREEDY)},
            {**GREEDY, "return_finish_reason": True},
            {"parameters": {**GREEDY, "stop": ["nowhere"]}},
        ]
        answers = [
            (await served.post("/v2/models/toy/generate", text_input="def f(x):", **body)).json()
            for body in bodies
        ]
        assert [answer["text_output"] for answer in answers] == [text] * len(bodies), answers
        assert (answers[1]["id"], answers[3]["finish_reason"]) == ("a", "length")
        prepended = await served.post(
            "/v2/models/toy/generate", text_input="def f(x):", exclude_input_in_output=False, **GREEDY
        )
        assert prepended.json()["text_output"] == f"def f(x):{text}"
        events = await served.events("/v2/models/toy/generate_stream", text_input="def f(x):", **GREEDY)
        assert len(events) > 1
        assert "".join(one["text_output"] for one in events) == text
        for path, body, message in (
            ("generate", {"stream": True}, "'stream' must be true in generate_stream"),
            ("generate", {"text_input": 1}, "must be a string"),
            ("generate", {"top_q": 1}, "no option"),
            ("generate_stream", {"top_p": 2}, "top_p must be a number"),
        ):
            answer = await served.post(f"/v2/models/toy/{path}", **{"text_input": "x", **body})
            assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text

    run(scenario)


def test_facts() -> None:
    async def scenario(served: HttpServed, llm: AsyncLLM) -> None:
        async def get(path: str) -> Any:
            answer = await served.client.get(f"/v2{path}")
            assert answer.status_code == 200, answer.text
            return answer.json() if answer.content else None

        for path in ("/health/live", "/health/ready", "/models/toy/ready", "/models/sum/versions/1/ready"):
            assert await get(path) is None
        assert "binary_tensor_data" in (await get(""))["extensions"]
        facts = await get("/models/sum")
        assert (facts["versions"], facts["inputs"][0]) == (
            ["1"], {"name": "A", "datatype": "FP32", "shape": [-1, 4]}
        )  # fmt: skip
        assert (await get("/models/toy/config"))["model_transaction_policy"] == {"decoupled": True}
        inputs = [tensor(name, "FP32", np.empty((3, 4)), data=[0.0] * 12) for name in "AB"]
        await served.post("/v2/models/sum/infer", inputs=inputs)
        assert (await get("/models/sum/stats"))["model_stats"][0]["inference_count"] == 3
        assert [one["name"] for one in (await get("/models/stats"))["model_stats"]] == ["toy", "sum"]
        assert (await served.post("/v2/repository/models/toy/unload")).status_code == 200
        assert (await served.client.get("/v2/models/toy/ready")).status_code == 503
        index = (await served.post("/v2/repository/index", ready=True)).json()
        assert [(one["name"], one["state"]) for one in index] == [("sum", "READY")]
        for path in ("/models/no", "/models/sum/versions/2", "/models/no/ready"):
            answer = await served.client.get(f"/v2{path}")
            assert (answer.status_code, "there is no model" in answer.json()["error"]) == (404, True)
        refused = await served.post("/v2/repository/models/toy/load", parameters={"config": "{}"})
        assert refused.status_code == 501
        register = "/v2/systemsharedmemory/region/r/register"
        assert (await served.post(register, key="k", offset=0, byte_size=1)).status_code == 501
        assert (await served.post(register, key=1)).status_code == 400
        assert await get("/systemsharedmemory/status") == []

    run(scenario, sum=sum_model())


def test_large_bodies_are_parsed_beside_running_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, so that the loop that sends streams goes on."""
    own, seen = read_object, list[bool]()

    def read(body: bytes) -> dict[str, Any]:
        seen.append(threading.current_thread() is threading.main_thread())
        return own(body)

    monkeypatch.setattr(kserve, "read_object", read)
    paths = ["models/toy/generate", "models/toy/generate_stream", "repository/index"]
    paths += ["repository/models/toy/load", "systemsharedmemory/region/one/register"]

    async def scenario(served: HttpServed, _: AsyncLLM) -> None:
        for path in paths:
            for size in (10, 100_000):
                await served.client.post(f"/v2/{path}", json={"text_input": 5, "x": "y" * size})
        fields = {"text_input": "x", "sampling_parameters": " " * 70_000 + "{}"}
        refused = await served.client.post("/v2/models/toy/generate", json=fields)
        assert refused.status_code == 400
        assert "sampling_parameters has 70,002 characters, more than 65,536" in refused.text

    run(scenario)
    assert seen == [True, False] * len(paths) + [False]
