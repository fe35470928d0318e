"""Decode steps with LoRA adapters, as ratios to the model without branches for adapters.

All variants run in turn in each round, and the ratios of a round are of its own times, so that other load
changes all of them. ``python benchmarks/engine/lora.py MODEL --rank 16 --rounds 12``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from carryall.providers.base import Row, Runner
from carryall.runtime.models.loading import load_model

ADAPTERS, BATCHES = 4, (1, 8)


def random_matrices(modules: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, Any]:
    """Return an adapter that changes all modules."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.normal(0, 0.01, (rank, inputs)).astype(np.float32),
            rng.normal(0, 0.01, (rank, outputs)).astype(np.float32),
        )
        for name, (inputs, outputs) in modules.items()
    }


def fill(runner: Runner, places: Sequence[int | None], context: int) -> None:
    """Compute a prompt of ``context`` tokens for each row."""
    for slot, place in enumerate(places):
        runner.forward([Row(slot, np.arange(context) % 1000 + 5, 0, 1, lora=place)])


def steps(runner: Runner, places: Sequence[int | None], context: int, count: int) -> Callable[[], float]:
    """Return a function that runs ``count`` decode steps and returns the processor seconds of one."""

    def run() -> float:
        begin = time.process_time()
        for step in range(count):
            runner.forward(
                [Row(slot, np.array([7]), context + step, 1, lora=place) for slot, place in enumerate(places)]
            )
        return (time.process_time() - begin) / count

    return run


def main() -> None:
    """Print the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lora-module", action="append", default=[])
    options = parser.parse_args()
    common: dict[str, Any] = {"max_slots": max(BATCHES), "context_length": 256}
    plain = load_model(options.model, **common).runner
    adapted: Any = load_model(
        options.model,
        max_loras=ADAPTERS,
        max_lora_rank=options.rank,
        lora_modules=tuple(options.lora_module),
        **common,
    ).runner
    for place in range(ADAPTERS):
        adapted.load_lora(place, random_matrices(adapted.info.lora_modules, options.rank, place))
    none: list[int | None] = [None]
    for rows in BATCHES:
        variants: dict[str, tuple[Any, list[int | None]]] = {
            "without LoRA": (plain, none * rows),
            "0 adapters": (adapted, none * rows),
            "1 adapter": (adapted, [0] * rows),
        }
        if rows >= ADAPTERS:
            variants[f"{ADAPTERS} adapters"] = (adapted, [row % ADAPTERS for row in range(rows)])
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, (runner, places) in variants.items():
                fill(runner, places, options.context)
                times[name].append(steps(runner, places, options.context, options.steps)())
        base = times["without LoRA"]
        for name, own in times.items():
            ratio = statistics.median(one / other for one, other in zip(own, base, strict=True))
            middle = 1e3 * statistics.median(own)
            print(
                f"{rows} rows, {name}: {middle:.1f} ms of processor time a step, ratio {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
