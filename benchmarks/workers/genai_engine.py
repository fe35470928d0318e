"""Measure onnxruntime-genai on a trace in static batches of eight, its only batching on a CPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import onnxruntime_genai as og
from traces import Ask, Served, Trace
from worker import serve

BATCH = 8


def load(path: str) -> tuple[str, Callable[[Trace], Served]]:
    """Load the model and return the engine's name and its measuring function."""
    model = og.Model(og.Config(path))

    def measure(trace: Trace) -> Served:
        start = time.perf_counter()
        for group in dataclasses.replace(trace, batch=BATCH).static_batches():
            _generate(model, group)
        return Served(time.perf_counter() - start, sum(ask.new_tokens for ask in trace.asks()))

    return f"onnxruntime-genai {og.__version__}, static batches of {BATCH}", measure


def _generate(model: og.Model, group: list[Ask]) -> None:
    """Run a group of requests that are padded to the same lengths."""
    length = len(group[0].tokens) + group[0].new_tokens
    params = og.GeneratorParams(model)
    params.set_search_options(
        do_sample=False, max_length=length + 2, min_length=length + 1, batch_size=len(group)
    )
    generator = og.Generator(model, params)
    prompts = np.stack([ask.tokens for ask in group]).astype(np.int32)
    generator.append_tokens(prompts if len(group) > 1 else prompts[0])
    for _ in range(group[0].new_tokens):
        generator.generate_next_token()


serve(load, Trace)
