"""Measure OpenVINO GenAI's continuous-batching pipeline on a trace, with its prefix cache for shared traces.

The model is ``PATH`` or ``PATH,PROPERTY=VALUE,...`` with OpenVINO properties that replace its defaults, such
as ``DYNAMIC_QUANTIZATION_GROUP_SIZE=128``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import openvino as ov
import openvino_genai as og
from traces import Ask, Served, Trace
from worker import serve


def load(argument: str) -> tuple[str, Callable[[Trace], Served]]:
    """Load the model and return the engine's name and its measuring function."""
    path, *given = argument.split(",")
    properties = dict(text.split("=", 1) for text in given)
    pipelines: dict[bool, og.ContinuousBatchingPipeline] = {}

    def pipeline(prefix_caching: bool) -> og.ContinuousBatchingPipeline:
        if prefix_caching not in pipelines:
            pipelines.clear()  # one model in memory at a time
            pipelines[prefix_caching] = _pipeline(path, prefix_caching, properties)
        return pipelines[prefix_caching]

    def measure(trace: Trace) -> Served:
        shared = trace.kind == "shared"
        engine, asks = pipeline(shared), trace.asks()
        if shared:
            _generate(engine, asks[:1])
            asks = asks[1:]
        start = time.perf_counter()
        _generate(engine, asks)
        return Served(time.perf_counter() - start, sum(ask.new_tokens for ask in asks))

    return " ".join([f"openvino-genai {og.__version__}", *given]), measure


def _pipeline(path: str, prefix_caching: bool, properties: dict[str, str]) -> og.ContinuousBatchingPipeline:
    scheduler = og.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = prefix_caching
    pipeline = og.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    _generate(pipeline, [Ask(np.arange(2, 66), 4)] * 2)  # the first run compiles the kernels
    return pipeline


def _generate(pipeline: og.ContinuousBatchingPipeline, asks: list[Ask]) -> None:
    configs = []
    for ask in asks:
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = ask.new_tokens, True, False
        configs.append(config)
    results = pipeline.generate([ov.Tensor(ask.tokens[None].astype(np.int64)) for ask in asks], configs)
    generated = sum(len(result.m_generation_ids[0]) for result in results)
    if generated != sum(ask.new_tokens for ask in asks):
        wanted = sum(ask.new_tokens for ask in asks)
        raise RuntimeError(f"generated {generated} tokens instead of {wanted}")


serve(load, Trace)
