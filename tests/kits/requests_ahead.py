"""Requests of many kinds on a runner that takes a step ahead, or one step at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_kit import make_request, run

from carryall.runtime.engine import step
from carryall.runtime.engine.engine import Engine
from carryall.runtime.types.sampling_params import SamplingParams

_TOKENS = 250  # of prompts

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.5, "logprobs": 3},
    {"temperature": 0.9},  # the host alone can draw it
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.6, "top_k": 5, "max_tokens": 1},
]


@dataclass(frozen=True)
class Results:
    """What became of requests.

    Args:
        tokens: of each request.
        ends: the reason of the end of each, and its error.
        logprobs: token ids and log-probabilities of those that asked for them.
    """

    tokens: list[Any]
    ends: list[Any]
    logprobs: list[Any] = field(compare=False)

    def check(self, other: Results) -> None:
        """Check that others are equal, log-probabilities but for rounding."""
        assert self == other
        np.testing.assert_allclose(self.logprobs, other.logprobs, atol=2e-5)


def results(runner: Any, *, steps_ahead: int = 1) -> Results:
    """Run greedy and seeded requests of many lengths; return what became of them."""
    assert steps_ahead <= runner.info.steps_ahead
    runner.info = dataclasses.replace(runner.info, steps_ahead=steps_ahead)
    engine, rng = Engine(runner), np.random.default_rng(7)
    requests = [
        make_request(
            f"r{i}",
            rng.integers(0, _TOKENS, int(rng.integers(1, 90))).tolist(),
            SamplingParams(**{"seed": i, "max_tokens": 5 + i % 17, **WAYS[i % len(WAYS)]}),
            end_token_ids=[3, 5, 8],
        )
        for i in range(25)
    ]
    tokens = run(engine, requests)
    ends = [(request.finish_reason, str(request.error)) for request in requests]
    listed = [one for request in requests for token in request.output_logprobs or [] for one in token]
    assert len(listed) > 30
    return Results(tokens, ends, [(one.token_id, one.logprob) for one in listed])


def compared_draws(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each row with a drawn token, whether the host drew another."""
    found: list[bool] = []
    outdated = step._outdated

    def compared(plan: Any, *, ran: bool) -> set[int]:
        wrong = outdated(plan, ran=ran)
        ended = outdated(plan, ran=False)
        found.extend(
            i in wrong for i, row in enumerate(plan.rows) if row.source is not None and i not in ended
        )
        return wrong

    monkeypatch.setattr(step, "_outdated", compared)
    return found
