"""Measure the host's own time of a decode step: scheduling, sampling and bookkeeping, without a model.

    python benchmarks/engine/host_step.py [--rows 1 8 32 128] [--rounds 40] [--all-logits]

A stand-in for a device returns the 64 largest of 151,936 logits at once, or all. Reported is the least CPU
time of the thread over rounds of 20 steps, in microseconds a row, since other processes only add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.providers.base import BestLogits, Pending, Row, Runner, RunnerInfo
from carryall.providers.kv_groups import FullKV
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

VOCAB, BEST, STEPS = 151_936, 64, 20
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


class StandIn(Runner):
    """A runner that computes nothing.

    Args:
        rows: number of sequences.
        best: number of logits of each; 0 returns all.
    """

    def __init__(self, rows: int, best: int) -> None:
        self.info = RunnerInfo(
            VOCAB, 4096, rows, (FullKV(114_688),), batched_multi_token=True, top_logits=best, on_device=True
        )
        random = np.random.default_rng(0)
        self._whole = random.normal(0, 4, VOCAB).astype(np.float32)
        self._best = []
        for _ in range(rows):
            logits = -np.sort(-random.normal(0, 4, BEST)).astype(np.float32)
            ids = random.choice(VOCAB, BEST, replace=False)
            total = float(np.log(np.exp(logits).sum()) + 1e-3)
            self._best.append(BestLogits(ids, logits, total, VOCAB, lambda: self._whole))

    def submit(self, rows: Sequence[Row]) -> Pending[list[npt.NDArray[np.float32] | BestLogits]]:
        """Return the same logits in every step."""
        if not self.info.top_logits:
            return Pending(lambda: [self._whole[None]] * len(rows))
        return Pending(lambda: [*self._best[: len(rows)]])

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Return zeros."""
        return [np.zeros((row.num_logits, VOCAB), np.float32) for row in rows]

    kv_bytes = 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Do nothing."""

    def release(self, slot: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--all-logits", action="store_true")
    arguments = parser.parse_args()
    best = 0 if arguments.all_logits else BEST
    print("| rows | " + " | ".join(WAYS) + " |\n| --- " + "| --- " * len(WAYS) + "|")
    for rows in arguments.rows:
        times = [_measure(rows, best, options, arguments.rounds) for options in WAYS.values()]
        print(f"| {rows} | " + " | ".join(f"{1e6 * seconds / rows:.1f} us a row" for seconds in times) + " |")


def _measure(rows: int, best: int, options: dict[str, Any], rounds: int) -> float:
    """Return the least CPU seconds of a step."""
    engine = Engine(StandIn(rows, best), EngineConfig())
    params = SamplingParams(max_tokens=4000, ignore_eos=True, **options)
    requests = [
        Request(str(i), np.random.default_rng(i).integers(2, 7000, 64).tolist(), params) for i in range(rows)
    ]
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    least = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(STEPS):
            engine.step()
        least = min(least, (time.thread_time() - begin) / STEPS)
    engine.close()
    return least


if __name__ == "__main__":
    main()
