"""Metrics by vLLM's names: what they count, against requests whose figures are known."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_serving import repository
from null_llm import null_llm
from prometheus_client.parser import text_string_to_metric_families

from carryall.runtime.service.core.messages import Delta, GenerationRequest
from carryall.runtime.service.telemetry.metrics import Metrics
from carryall.runtime.types.sampling_params import SamplingParams

# What routers of the Gateway API inference extension and vLLM's dashboards read.
NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "process_resident_memory_bytes",
}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = list(text_string_to_metric_families(metrics.text().decode()))
    assert {family.name for family in families} >= NAMES
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, frozenset({"model_name": "toy", "engine": "0", **labels}.items())]


def ask(tokens: int, n: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, n=n)
    return GenerationRequest(prompt=[5, 6, 7], params=params)


def test_figures_are_those_of_the_requests() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm:
            models = repository(llm)
            metrics = Metrics(models)
            assert "toy" in metrics.text().decode()  # its state, while it is not loaded
            await models.load_all()
            for tokens in (5, 9):
                await models.llm().complete(ask(tokens))
            stream = models.llm().generate(ask(4000))
            assert (await anext(stream)).opens
            await anext(stream)
            found = samples(metrics)
            assert of(found, "vllm:num_requests_running") == 1
            assert of(found, "vllm:kv_cache_usage_perc") > 0
            await stream.aclose()
            while llm.stats().running:
                await asyncio.sleep(0.002)
            found = samples(metrics)
            assert of(found, "vllm:num_requests_running") == 0
            assert of(found, "vllm:kv_cache_usage_perc") == 0
            assert of(found, "vllm:request_success_total", finished_reason="length") == 2
            assert of(found, "vllm:request_success_total", finished_reason="abort") == 1
            assert of(found, "vllm:prompt_tokens_total") == 9
            assert of(found, "vllm:request_generation_tokens_sum") == 14
            assert of(found, "vllm:request_generation_tokens_count") == 2
            assert of(found, "vllm:time_to_first_token_seconds_count") == 3
            assert of(found, "vllm:e2e_request_latency_seconds_sum") >= 14 * 0.01
            assert of(found, "vllm:request_decode_time_seconds_sum") >= 12 * 0.01
            assert of(found, "vllm:inter_token_latency_seconds_sum") >= 12 * 0.01 * 0.5
            budget = str(4 * llm.context_length)
            labels = {"block_size": "1", "num_gpu_blocks": budget, "enable_prefix_caching": "True"}
            assert of(found, "vllm:cache_config_info", **labels) == 1

    asyncio.run(scenario())


def test_waiting_requests_are_counted() -> None:
    async def scenario() -> None:
        async with null_llm(max_slots=1, step_seconds=0.005) as llm:
            models = repository(llm)
            metrics = Metrics(models)
            await models.load_all()
            tasks = [asyncio.create_task(models.llm().complete(ask(500))) for _ in range(3)]
            while llm.stats().waiting < 2:
                await asyncio.sleep(0.002)
            found = samples(metrics)
            assert of(found, "vllm:num_requests_waiting") == 2
            assert of(found, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_each_token_of_a_delta_counts() -> None:
    async def scenario() -> None:
        metrics = Metrics(repository(None))
        request = metrics.begin("toy", ask(4))
        request.delta(Delta(request_id="r", index=0, token_ids=[1]), None)
        request.delta(Delta(request_id="r", index=0, token_ids=[2, 3, 4]), None)
        found = samples(metrics)
        assert of(found, "vllm:inter_token_latency_seconds_count") == 3
        assert of(found, "vllm:time_to_first_token_seconds_count") == 1

    asyncio.run(scenario())
