"""Times of decode steps and prompts with onnxruntime's CPU kernels and with carryall's, in turns.

    python benchmarks/decoders/cpu_kernels.py MODEL --rounds 9

The model needs int4 or int8 weights; the kernels must be built (``carryall doctor --build-kernels``).
Reported are minima over the rounds, and their ratio. Both runners stay open, so a pause and an untimed run
come before each timed one: threads of the other runner may still spin.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from carryall.providers.base import Row, Runner
from carryall.runtime.models.loading import load_model

BATCHES, PROMPTS, CACHED = (1, 4, 8, 12, 16, 32), (64, 256), 64
_PAUSE = 0.02  # seconds


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    runners = {
        kernels: load_model(
            asked.model,
            max_slots=max(BATCHES),
            context_length=512,
            provider_options={"kernels": kernels},
        ).runner
        for kernels in ("onnxruntime", "carryall")
    }
    tokens = np.random.default_rng(0).integers(5, runners["carryall"].info.vocab_size - 5, max(PROMPTS))
    for runner in runners.values():
        for slot in range(max(BATCHES)):
            runner.forward([Row(slot, tokens[:CACHED], 0)])

    def step(runner: Runner, batch: int) -> None:
        runner.forward([Row(slot, tokens[:1], CACHED) for slot in range(batch)])

    def prompt(runner: Runner, length: int) -> None:
        runner.forward([Row(0, tokens[:length], 0)])

    cases: list[tuple[str, Callable[[Runner, int], None], int]] = [
        *(("decode, batch", step, batch) for batch in BATCHES),
        *(("prompt of", prompt, length) for length in PROMPTS),
    ]
    for name, run, size in cases:
        seconds = _fastest(run, size, asked.rounds, runners)
        shown = ", ".join(f"{kernels} {1e3 * value:.1f} ms" for kernels, value in seconds.items())
        print(f"{name} {size}: {shown}, ratio {seconds['onnxruntime'] / seconds['carryall']:.2f}", flush=True)


def _fastest(
    run: Callable[[Runner, int], None], size: int, rounds: int, runners: dict[str, Runner]
) -> dict[str, float]:
    found = dict.fromkeys(runners, float("inf"))
    for _ in range(rounds):
        for kernels, runner in runners.items():
            time.sleep(_PAUSE)
            run(runner, size)
            start = time.perf_counter()
            run(runner, size)
            found[kernels] = min(found[kernels], time.perf_counter() - start)
    return found


if __name__ == "__main__":
    main()
