"""Measure the time of sampling tokens relative to a decode step.

    python benchmarks/engine/sampling.py MODEL [--batch 1 8 32] [--rounds 20] [--json]

Each round runs a decode step of the model, then samples from its logits with every sampler. Reported is the
median CPU time. The step's CPU time is divided by its number of threads, which estimates its wall time on an
idle machine. The share is sampling / (step + sampling).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from carryall.providers.base import Row, Runner
from carryall.runtime.engine.sampling.sampler import sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.models.loading import load_model
from carryall.runtime.types.sampling_params import SamplingParams

PROMPT_TOKENS = 64
THREADS = os.cpu_count() or 1
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.95, few likely tokens": {"top_p": 0.95, "temperature": 0.1},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "typical-p 0.9": {"typical_p": 0.9},
    "mirostat 2": {"mirostat": 2},
    "XTC, min-p 0.02": {"xtc_probability": 0.5, "min_p": 0.02},
    "DRY": {"temperature": 0.0, "dry_multiplier": 0.8},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    slots = max(arguments.batch)
    runner = load_model(arguments.model, max_slots=slots, context_length=1024, num_threads=THREADS).runner
    try:
        results = {batch: _measure(runner, batch, arguments.rounds) for batch in arguments.batch}
    finally:
        runner.close()
    if arguments.json:
        print(json.dumps(results))
    else:
        _print(results)


def _measure(runner: Runner, batch: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of a decode step of ``batch`` rows, and of each sampler on its logits."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, runner.info.vocab_size, (batch, PROMPT_TOKENS))
    for slot in range(batch):
        runner.forward([Row(slot, prompts[slot], 0)])
    states = {
        name: [
            SamplingState(SamplingParams(max_tokens=None, seed=slot, **options), prompts[slot])
            for slot in range(batch)
        ]
        for name, options in SAMPLERS.items()
    }
    times: dict[str, list[float]] = {"step": [], **{name: [] for name in SAMPLERS}}
    tokens = prompts[:, -1]
    for place in range(rounds):
        rows = [Row(slot, tokens[slot : slot + 1], PROMPT_TOKENS + place) for slot in range(batch)]
        logits, spent, _ = _timed(functools.partial(_logits, runner, rows))
        times["step"].append(spent / THREADS)
        for name, own in states.items():
            drawn, _, spent = _timed(functools.partial(sample, logits, own))
            times[name].append(spent)
            for state, chosen in zip(own, drawn, strict=True):
                state.observe(chosen.token_id, chosen.surprise)
            if name == "temperature":
                tokens = np.array([chosen.token_id for chosen in drawn])
    return {name: 1e3 * float(np.median(values)) for name, values in times.items()}


def _logits(runner: Runner, rows: list[Row]) -> list[Any]:
    return [result[-1] for result in runner.forward(rows)]


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of a call, CPU seconds of all threads, and CPU seconds of this thread."""
    process, thread = time.process_time(), time.thread_time()
    result = call()
    return result, time.process_time() - process, time.thread_time() - thread


def _print(results: dict[int, dict[str, float]]) -> None:
    print("| batch " + "".join(f"| {batch} | share " for batch in results) + "|")
    print("| --- " + "| --- | --- " * len(results) + "|")
    for name in ("step", *SAMPLERS):
        cells = []
        for times in results.values():
            share = "" if name == "step" else f"{times[name] / (times['step'] + times[name]):.1%}"
            cells.append(f"| {times[name]:.2f} ms | {share} ")
        print(f"| {name} {''.join(cells)}|")


if __name__ == "__main__":
    main()
