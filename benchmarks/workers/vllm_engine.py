"""Measure vLLM on the CPU on a trace, with its prefix cache for shared traces."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from traces import Ask, Served, Trace
from vllm_cpu import opened, prepare, version
from worker import serve


def load(path: str) -> tuple[str, Callable[[Trace], Served]]:
    """Load the model and return the engine's name and its measuring function."""
    llm = opened(path, enable_prefix_caching=True, max_num_seqs=32)
    _generate(llm, [Ask(np.arange(2, 66), 4)] * 2)

    def measure(trace: Trace) -> Served:
        asks = trace.asks()
        llm.reset_prefix_cache()
        if trace.kind == "shared":
            _generate(llm, asks[:1])
            asks = asks[1:]
        start = time.perf_counter()
        _generate(llm, asks)
        return Served(time.perf_counter() - start, sum(ask.new_tokens for ask in asks))

    return version(), measure


def _generate(llm, asks: list[Ask]) -> None:  # noqa: ANN001
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=ask.new_tokens, ignore_eos=True, detokenize=False)
        for ask in asks
    ]
    results = llm.generate(
        [{"prompt_token_ids": ask.tokens.tolist()} for ask in asks], params, use_tqdm=False
    )
    generated = sum(len(result.outputs[0].token_ids) for result in results)
    wanted = sum(ask.new_tokens for ask in asks)
    if generated != wanted:
        raise RuntimeError(f"generated {generated} tokens instead of {wanted}")


prepare()
serve(load, Trace)
