"""Equal seeds give equal tokens for good: a table of tokens drawn at 0.1.0, by options, spread and size.

The table holds what ``tokens_of`` returned for each case. A change of its tokens changes the results of
seeded requests: it is a change of behaviour, not of a test.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.providers.base import BestLogits
from carryall.runtime.engine.sampling.sampler import best_may_suffice, sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "drawn_tokens.json").read_text())
SEEDS = 16


def logits_of(case: dict[str, Any]) -> Logits:
    """Return logits [size]; those with ties are rounded."""
    random = np.random.default_rng(case["size"])
    logits: Logits = random.normal(0, case["spread"], case["size"]).astype(np.float32)
    if case["ties"]:
        logits = np.round(logits, 1 if case["spread"] < 1 else 0)
    return logits


def states_of(case: dict[str, Any]) -> list[SamplingState]:
    return [
        SamplingState(SamplingParams(seed=seed, **case["options"]), np.empty(0, np.int64))
        for seed in range(SEEDS)
    ]


def tokens_of(rows: list[Any], states: list[SamplingState]) -> list[int]:
    """Return the tokens of one step."""
    drawn = sample(rows, states)
    for state, each in zip(states, drawn, strict=True):
        state.observe(each.token_id, each.surprise)
    return [each.token_id for each in drawn]


@pytest.mark.long
@pytest.mark.parametrize("options", dict.fromkeys(json.dumps(case["options"]) for case in TABLE))
def test_the_tokens_of_each_way_to_sample(options: str) -> None:
    for case in TABLE:
        if json.dumps(case["options"]) == options:
            states, rows = states_of(case), [logits_of(case)] * SEEDS
            assert tokens_of(rows, states) + tokens_of(rows, states) == case["tokens"]


@pytest.mark.long
def test_all_ways_in_one_step_give_the_same_tokens() -> None:
    """Rows of one vocabulary; a step takes them from 12 cases, so that ways and spreads mix."""
    for size in {case["size"] for case in TABLE}:
        cases = [case for case in TABLE if case["size"] == size]
        cases = [cases[i] for i in np.random.default_rng(size).permutation(len(cases))]
        for group in [cases[start : start + 12] for start in range(0, len(cases), 12)]:
            states = [state for case in group for state in states_of(case)]
            rows = [logits for case in group for logits in [logits_of(case)] * SEEDS]
            first, second = tokens_of(rows, states), tokens_of(rows, states)
            for i, case in enumerate(group):
                part = slice(i * SEEDS, (i + 1) * SEEDS)
                assert first[part] + second[part] == case["tokens"]


@pytest.mark.long
@pytest.mark.usefixtures("draws")
@pytest.mark.parametrize("count", [8, 64, 600])
def test_the_largest_logits_give_the_same_tokens(count: int) -> None:
    """A device's largest logits decide, or the row is fetched."""
    for case in TABLE:
        states, logits = states_of(case), logits_of(case)
        if not best_may_suffice(states[0], count):
            continue
        order = np.argsort(-logits, kind="stable")[:count]
        total = float(np.log(np.exp(logits.astype(np.float64)).sum()))
        best = BestLogits(order, logits[order], total, len(logits), functools.partial(np.copy, logits))
        rows: list[Any] = [best] * SEEDS
        assert tokens_of(rows, states) + tokens_of(rows, states) == case["tokens"]
