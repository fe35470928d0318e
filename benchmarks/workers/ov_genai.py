"""Measure OpenVINO GenAI's continuous-batching pipeline on an exported IR folder."""

from __future__ import annotations

import time

import openvino as ov
import openvino_genai as og
from worker import Timing, Work, serve


def load(path: str):  # noqa: ANN201 -- the engine's library has no types
    """Load the model and return the engine's name and its measuring function."""
    scheduler = og.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipeline = og.ContinuousBatchingPipeline(path, scheduler, "CPU")

    def generate(work: Work, new_tokens: int) -> tuple[float, int]:
        config = og.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompts = [ov.Tensor(row[None]) for row in work.prompts()]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        return time.perf_counter() - start, sum(len(r.m_generation_ids[0]) for r in results)

    def measure(work: Work) -> Timing:
        first, _ = generate(work, 1)
        whole, generated = generate(work, work.new_tokens)
        return Timing(first, whole - first, generated)

    return f"openvino-genai {og.__version__}", measure


serve(load)
