"""Tensor models whose requests run together."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import onnx_ir as ir
import pytest
from grpc_serving import INFO, code_of, serving
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from tensor_models import echo_model, sum_model

from carryall.errors import UsageError
from carryall.proto import kserve_pb2 as pb
from carryall.proto.kserve_pb2_grpc import GRPCInferenceServiceStub
from carryall.runtime.api.session import InferenceSession
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.core.tensor_model import Batching, TensorModel


def tensor(name: str, rows: int, columns: int = 4, value: float = 1) -> dict[str, Any]:
    data = np.full((rows, columns), value).tolist()
    return {"name": name, "datatype": "FP32", "shape": [rows, columns], "data": data}


async def added(served: HttpServed, rows: int, value: float, columns: int = 4) -> Any:
    inputs = [tensor("A", rows, columns, value), tensor("B", rows, columns, 1)]
    return await served.post("/v2/models/sum/infer", inputs=inputs)


def test_requests_run_in_batches_and_each_gets_its_rows() -> None:
    model = TensorModel(sum_model(), Batching(max_size=8, max_delay=0.3))

    async def scenario() -> None:
        async with null_llm() as llm:
            loaders: dict[str, Any] = {"toy": lambda: ServedModel(llm, INFO)}
            models = ModelRepository({**loaders, "sum": ModelLoader(lambda: model, kind="tensor")})
            async with http_serving(None, models) as served:
                answers = await asyncio.gather(*[added(served, 2, value) for value in range(8)])
                for value, answer in enumerate(answers):
                    output = answer.json()["outputs"][0]
                    assert (output["shape"], output["data"]) == ([2, 4], [value + 1.0] * 8)
                assert model.batcher is not None
                assert model.batcher.runs < 8  # 16 rows in batches of 8; 2 if all arrived in time
                large = await added(served, 20, 3)  # more than a batch holds: runs alone
                assert large.json()["outputs"][0]["shape"] == [20, 4]
                wrong, right = await asyncio.gather(added(served, 1, 1, columns=3), added(served, 1, 5))
                assert (wrong.status_code, "error" in wrong.json()) == (400, True)
                assert right.json()["outputs"][0]["data"] == [6.0] * 4

    asyncio.run(scenario())


def test_a_full_queue_of_a_model_without_batches_asks_to_retry() -> None:
    release = asyncio.Event()

    class Slow(TensorModel):
        def __init__(self) -> None:
            super().__init__(sum_model(), max_queue=1)
            run = self.session.run_awaited

            async def waits(names: Any, feeds: Any) -> Any:
                await release.wait()
                return await run(names, feeds)

            self.session.run_awaited = waits  # type: ignore[assignment, method-assign]

    model = Slow()
    inputs = [
        pb.ModelInferRequest.InferInputTensor(
            name=name, datatype="FP32", shape=[1, 4], contents=pb.InferTensorContents(fp32_contents=[1] * 4)
        )
        for name in "AB"
    ]
    infer = pb.ModelInferRequest(model_name="sum", inputs=inputs)

    async def scenario() -> None:
        async with null_llm() as llm:
            loaders: dict[str, Any] = {"toy": lambda: ServedModel(llm, INFO)}
            models = ModelRepository({**loaders, "sum": ModelLoader(lambda: model, kind="tensor")})
            async with serving(llm, models) as by_grpc, http_serving(None, models) as served:
                first = [asyncio.create_task(added(served, 1, value)) for value in range(2)]
                while model.alone < 2:
                    await asyncio.sleep(0.002)
                refused = await added(served, 1, 1)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert refused.json() == {"error": "1 requests are waiting; retry later"}
                async with grpc.aio.insecure_channel(by_grpc.address) as channel:
                    stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                    code, text = await code_of(stub.ModelInfer(infer))
                    assert (code, text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, refused.json()["error"])
                    release.set()
                    assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
                    assert (await stub.ModelInfer(infer)).model_name == "sum"
                assert model.alone == 0

    asyncio.run(scenario())


def test_a_model_without_a_batch_axis_is_refused() -> None:
    value = ir.val("A", ir.DataType.FLOAT, [2])
    node = ir.node("Identity", [value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "B", value.type, value.shape
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 21})
    session = InferenceSession(ir.Model(graph, ir_version=10), providers=["cpu"])
    with pytest.raises(UsageError, match="needs a free first axis"):
        TensorModel(session, Batching())


def test_a_warm_up_runs_on_zeros_if_it_can() -> None:
    assert TensorModel(sum_model()).warm_up()
    assert TensorModel(echo_model(ir.DataType.STRING)).warm_up()
    assert not TensorModel(echo_model(ir.DataType.BFLOAT16)).warm_up()
