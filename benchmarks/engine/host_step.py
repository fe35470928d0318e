"""Measure the host's own time of a decode step: scheduling, sampling and bookkeeping, without a model.

    python benchmarks/engine/host_step.py [--rows 1 8 32 128] [--rounds 40] [--ahead] [--all-logits]

A stand-in for a device returns the 64 largest of 151,936 logits at once, or all; with ``--ahead`` it takes a
step while the one before it is in flight, as CUDA does. Reported is the least CPU time of the thread over
rounds of 20 steps, in microseconds a row, since other processes only add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.providers.base import BestLogits, Pending, Row, Runner, RunnerInfo
from carryall.providers.kv_groups import FullKV
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Grammar, Request
from carryall.runtime.engine.sampling.filters import COLDEST, Filters
from carryall.runtime.engine.sampling.random_sampling import draw_best
from carryall.runtime.text.grammars import forbid
from carryall.runtime.types.sampling_params import SamplingParams

VOCAB, BEST, STEPS = 151_936, 64, 20
MASK = "grammar"  # of a request: a mask of half the vocabulary, as a grammar's
NUCLEUS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8, "seed": 1},
    "temperature 0.8, top-p 0.95": NUCLEUS,
    "the same, 5 log-probabilities": NUCLEUS | {"logprobs": 5},
    "temperature 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 1},
    "the same, repetition penalty 1.05": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
        "seed": 1,
    },
    "min-p 0.05": {"min_p": 0.05, "seed": 1},
    "greedy, presence penalty 1": {"temperature": 0.0, "presence_penalty": 1.0},
    "greedy, a grammar": {"temperature": 0.0, MASK: True},
}


class HalfMask:
    """A grammar that never ends and allows the tokens of odd ids, whose masks take no time to compute."""

    lowers, finished, error = True, False, ""
    _mask = np.full(-(-VOCAB // 32), -0x55555556, np.int32)  # bits 1010...

    def prepare(self) -> None:
        """Do nothing."""

    def ready(self, seconds: float) -> bool:
        """Return True."""
        return True

    def observe(self, token: int) -> None:
        """Do nothing."""

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Forbid the even ids."""
        forbid(logits, self._mask)

    def copy(self) -> HalfMask:
        """Return the grammar, which has no state."""
        return self

    def forced_tokens(self) -> list[int]:
        """Return none."""
        return []

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the beginning are odd."""
        return next((i for i, token in enumerate(tokens) if token % 2 == 0), len(tokens))


class StandIn(Runner):
    """A runner that computes nothing.

    Args:
        rows: number of sequences.
        best: number of logits of each; 0 returns all.
        ahead: whether it takes a step while the one before it is in flight.

    Attributes:
        seconds: processor time of its own, to draw the tokens that it feeds to the next step.
    """

    def __init__(self, rows: int, best: int, *, ahead: bool) -> None:
        self.info = RunnerInfo(
            VOCAB,
            4096,
            rows,
            (FullKV(114_688),),
            batched_multi_token=True,
            top_logits=best,
            on_device=True,
            steps_ahead=int(ahead),
        )
        random = np.random.default_rng(0)
        self._whole = random.normal(0, 4, VOCAB).astype(np.float32)
        self._best = []
        for _ in range(rows):
            logits = -np.sort(-random.normal(0, 4, BEST)).astype(np.float32)
            ids = random.choice(VOCAB, BEST, replace=False)
            total = float(np.log(np.exp(logits).sum()) + 1e-3)
            self._best.append(BestLogits(ids, logits, total, VOCAB, lambda: self._whole))
        self._drawn: list[int] = []
        self.seconds = 0.0

    def submit(self, rows: Sequence[Row]) -> Pending[list[npt.NDArray[np.float32] | BestLogits]]:
        """Return the same logits in every step."""
        best, begin = self._best, time.thread_time()
        before, self._drawn = self._drawn, self._draw(rows)
        self.seconds += time.thread_time() - begin

        def wait() -> list[npt.NDArray[np.float32] | BestLogits]:
            for row in rows:
                if row.source is not None:
                    row.tokens[0] = before[row.source]
            return [best[row.slot] if row.best_suffice else self._whole[None] for row in rows]

        return Pending(wait)

    def _draw(self, rows: Sequence[Row]) -> list[int]:
        """Return the tokens that a device draws from the largest logits, 0 for rows without a draw."""
        draws = {i: row.draw for i, row in enumerate(rows) if row.draw is not None}
        if not draws:
            return []
        tokens = draw_best(
            [self._best[rows[i].slot] for i in draws],
            [
                Filters(d.temperature or COLDEST, top_k=d.top_k, top_p=d.top_p, min_p=d.min_p)
                for d in draws.values()
            ],
            [draw.uniform for draw in draws.values()],
        )
        drawn = dict(zip(draws, tokens, strict=True))
        return [drawn.get(i, 0) for i in range(len(rows))]

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
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--all-logits", action="store_true")
    arguments = parser.parse_args()
    best = 0 if arguments.all_logits else BEST
    print("| us a row | " + " | ".join(f"{rows} rows" for rows in arguments.rows) + " |")
    print("| --- " * (1 + len(arguments.rows)) + "|")
    for way, options in WAYS.items():
        times = [
            _measure(StandIn(rows, best, ahead=arguments.ahead), options, arguments.rounds) / rows
            for rows in arguments.rows
        ]
        print(f"| {way} | " + " | ".join(f"{1e6 * seconds:.1f}" for seconds in times) + " |")


def _measure(runner: StandIn, options: dict[str, Any], rounds: int) -> float:
    """Return the least CPU seconds of a step."""
    engine = Engine(runner, EngineConfig())
    grammar: Future[Grammar] | None = None
    if MASK in options:
        options, grammar = {name: value for name, value in options.items() if name != MASK}, Future()
        grammar.set_result(HalfMask())
    params = SamplingParams(max_tokens=4000, ignore_eos=True, **options)
    requests = [
        Request(str(i), np.random.default_rng(i).integers(2, 7000, 64).tolist(), params, grammar=grammar)
        for i in range(runner.info.max_slots)
    ]
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    least = float("inf")
    for _ in range(rounds):
        begin, others = time.thread_time(), runner.seconds
        for _ in range(STEPS):
            engine.step()
        least = min(least, (time.thread_time() - begin - (runner.seconds - others)) / STEPS)
    engine.close()
    return least


if __name__ == "__main__":
    main()
