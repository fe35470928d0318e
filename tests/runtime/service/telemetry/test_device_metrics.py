"""Metrics of device memory, with the figures of stand-ins for devices."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest
from grpc_serving import INFO
from null_llm import null_llm
from prometheus_client.parser import text_string_to_metric_families
from tensor_models import sum_model

from carryall.errors import ProviderUnavailableError
from carryall.providers.base import DeviceMemory
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.service.core.served_model import ServedModel
from carryall.runtime.service.core.tensor_model import TensorModel
from carryall.runtime.service.telemetry.device_metrics import DeviceMetrics
from carryall.runtime.service.telemetry.metrics import Metrics


def device_series(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("carryall:device_memory_"), sample.labels["device"]): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if "device_memory" in sample.name
    }


def test_each_device_of_a_loaded_model_has_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    used = [40]

    def gone() -> list[DeviceMemory]:
        raise ProviderUnavailableError("the device is gone")

    async def scenario() -> None:
        async with null_llm() as llm:
            on_gpu = ServedModel(llm, INFO, device_memory=lambda: [DeviceMemory("cuda:0", used[0], 100)])
            tensor = partial(ModelLoader, lambda: TensorModel(sum_model()), kind="tensor")
            models = ModelRepository(
                {
                    "toy": lambda: on_gpu,
                    "second": tensor(device_memory=lambda: [DeviceMemory("cuda:1", 7, 50)]),
                    "unloaded": tensor(wanted=False, device_memory=lambda: [DeviceMemory("cuda:2", 7, 50)]),
                    "lost": tensor(device_memory=gone),
                    "on the CPU": tensor(),
                }
            )
            metrics = Metrics(models, [DeviceMetrics(models)])
            assert device_series(metrics) == {}
            await models.load_all()
            expected = {
                ("used_bytes", "cuda:0"): 40, ("bytes", "cuda:0"): 100,
                ("used_bytes", "cuda:1"): 7, ("bytes", "cuda:1"): 50,
            }  # fmt: skip
            with caplog.at_level(logging.WARNING):
                assert device_series(metrics) == expected
            assert "the model 'lost': the device is gone" in caplog.text
            used[0] = 60
            assert device_series(metrics) == {**expected, ("used_bytes", "cuda:0"): 60}
            await models.drain(0)

    asyncio.run(scenario())


def test_there_are_none_on_the_cpu() -> None:
    async def scenario() -> None:
        async with null_llm() as llm:
            models = ModelRepository({"toy": lambda: ServedModel(llm, INFO)})
            await models.load_all()
            assert device_series(Metrics(models, [DeviceMetrics(models)])) == {}
            await models.drain(0)

    asyncio.run(scenario())
