"""Triton's metrics and statistics of tensor models."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from http_serving import HttpServed, http_serving
from null_llm import null_llm
from prometheus_client.parser import text_string_to_metric_families
from tensor_models import sum_model

from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.tensor_model import Batching, TensorModel

ROW: dict[str, Any] = {"datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
BODY = {"inputs": [{"name": "A", **ROW}, {"name": "B", **ROW}]}


async def metrics(served: HttpServed) -> dict[tuple[str, str], float]:
    """Triton's metrics of version 1, by name and model."""
    text = (await served.client.get("/metrics")).text
    return {
        (sample.name.removeprefix("nv_inference_"), sample.labels["model"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("nv_inference_")
    }


def test_requests_of_a_batch_share_its_run() -> None:
    batching = Batching(max_size=4, max_delay=5)  # a batch starts when it is full
    sessions = {"alone": TensorModel(sum_model()), "batched": TensorModel(sum_model(), batching)}
    loaders = {
        name: ModelLoader(partial(lambda one: one, model), kind="tensor") for name, model in sessions.items()
    }

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, ModelRepository(loaders)) as served:
            assert set((await metrics(served)).values()) == {0}
            for name in sessions:
                await asyncio.gather(*(served.post(f"/v2/models/{name}/infer", **BODY) for _ in range(4)))
            assert (await served.post("/v2/models/alone/infer", inputs=[])).status_code == 400
            found = await metrics(served)
            for name, runs, failures in (("alone", 4, 1), ("batched", 1, 0)):
                assert found["request_success", name] == found["count", name] == 4
                assert (found["exec_count", name], found["request_failure", name]) == (runs, failures)
                assert found["pending_request_count", name] == 0
                parts = [f"{part}_duration_us" for part in
                         ("queue", "compute_input", "compute_infer", "compute_output")]  # fmt: skip
                assert all(found[part, name] >= 0 for part in parts)
                assert found["compute_infer_duration_us", name] > 0
                assert sum(found[part, name] for part in parts) <= found["request_duration_us", name]
            assert found["queue_duration_us", "alone"] == 0 < found["queue_duration_us", "batched"]
            stats = (await served.client.get("/v2/models/batched/stats")).json()["model_stats"][0]
            assert (stats["inference_count"], stats["execution_count"]) == (4, 1)
            infer = stats["inference_stats"]["compute_infer"]
            assert infer["count"] == 4
            assert infer["ns"] / 1000 == found["compute_infer_duration_us", "batched"]
            (batch,) = stats["batch_stats"]
            assert (batch["batch_size"], batch["compute_infer"]["count"]) == (4, 1)
            assert batch["compute_infer"]["ns"] * 4 == infer["ns"]  # each request counts the run
            for part in ("compute_input", "compute_output"):
                assert batch[part] == {"count": 1, "ns": stats["inference_stats"][part]["ns"]}
            alone = (await served.client.get("/v2/models/alone/stats")).json()["model_stats"][0]
            (batch,) = alone["batch_stats"]
            assert batch == {"batch_size": 1, **{part: alone["inference_stats"][part] for part in
                             ("compute_input", "compute_infer", "compute_output")}}  # fmt: skip

    asyncio.run(scenario())
