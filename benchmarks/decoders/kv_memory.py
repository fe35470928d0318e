"""CPU time of decode steps and prompts with two instruction sets, or two types of the KV cache, in turns.

    python benchmarks/decoders/kv_memory.py MODEL --isas avx512vnni amx
    python benchmarks/decoders/kv_memory.py MODEL --kv-caches float32 bfloat16

The kernels must be built (``carryall doctor --build-kernels``). Both runners have one thread, whose CPU time
is measured, so that other work on the machine counts little. Reported are minima over the rounds, and their
ratio.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from carryall.graph_opt.lower.paged_kv import CACHE_TYPES
from carryall.providers.base import Row, Runner
from carryall.providers.native.library import ISA_VARIABLE
from carryall.runtime.models.loading import load_model

BATCHES, CONTEXTS, PROMPTS = (1, 8, 32), (64, 256, 1024), (256, 1024)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--kv-cache", default="auto", choices=("auto", *CACHE_TYPES))
    compared = parser.add_mutually_exclusive_group(required=True)
    compared.add_argument("--isas", nargs=2, help="compare instruction sets")
    compared.add_argument("--kv-caches", nargs=2, choices=CACHE_TYPES, help="compare types of the cache")
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="lengths in tokens")
    asked = parser.parse_args()
    runners, labels = [], asked.isas or asked.kv_caches
    for label in labels:
        if asked.isas:
            os.environ[ISA_VARIABLE] = label
        kind = label if asked.kv_caches else asked.kv_cache
        options = {"kernels": "carryall", "kv_memory": "paged", "kv_cache": kind}
        loaded = load_model(
            asked.model,
            max_slots=32,
            context_length=max(2048, *asked.prompts),
            num_threads=1,
            provider_options=options,
        )
        runners.append(loaded.runner)
    tokens = np.random.default_rng(0).integers(5, runners[0].info.vocab_size - 5, max(asked.prompts))
    for length in asked.prompts:
        _compare(
            f"prompt of {length}", labels, runners, [Row(0, tokens[:length], 0)], max(3, asked.rounds // 5)
        )
    for batch in BATCHES:
        for context in CONTEXTS:
            for runner in runners:
                _fill(runner, tokens[:context], batch)
            rows = [Row(slot, tokens[:1], context) for slot in range(batch)]
            _compare(f"decode, batch {batch}, context {context}", labels, runners, rows, asked.rounds)


def _fill(runner: Runner, tokens: np.ndarray, batch: int) -> None:
    """Let every slot hold the tokens, in blocks of its own."""
    for slot in range(batch):
        runner.release(slot)
        runner.forward([Row(slot, tokens, 0)])


def _compare(name: str, labels: Sequence[str], runners: list[Runner], rows: list[Row], rounds: int) -> None:
    def timed(work: Callable[[], object]) -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    seconds = [float("inf")] * len(runners)
    for _ in range(rounds):
        for index, runner in enumerate(runners):
            seconds[index] = min(seconds[index], timed(lambda runner=runner: runner.forward(rows)))  # type: ignore[misc]
    shown = ", ".join(f"{label} {1e3 * value:.1f} ms" for label, value in zip(labels, seconds, strict=True))
    print(f"{name}: {shown}, ratio {seconds[0] / seconds[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
