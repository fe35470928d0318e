"""Runs that need too much memory: prompts go on in smaller parts, requests wait for others; few fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_kit import GREEDY, alone, make_request, make_runner, run

from carryall.errors import OutOfMemoryError, ProviderRuntimeError
from carryall.providers.base import Row
from carryall.providers.ort import ort
from carryall.runtime.engine.engine import Engine, EngineConfig


class Short:
    """A runner whose runs have memory for so many tokens.

    Args:
        most: tokens of a run.
    """

    def __init__(self, most: int) -> None:
        self.runner, self.most, self.refused = make_runner(), most, list[int]()
        forward = self.runner.forward

        def limited(rows: Sequence[Row]) -> Any:
            tokens = sum(len(row.tokens) for row in rows)
            if tokens > self.most:
                self.refused.append(tokens)
                raise OutOfMemoryError(f"{tokens} tokens need too much memory")
            return forward(rows)

        self.runner.forward = limited  # type: ignore[method-assign]


def opened(most: int) -> tuple[Engine, Short]:
    short = Short(most)
    return Engine(short.runner, EngineConfig(max_step_tokens=128, prefix_cache=False)), short


def test_a_prompt_goes_on_in_smaller_parts(caplog: pytest.LogCaptureFixture) -> None:
    engine, short = opened(20)
    request = make_request("a", 150, GREEDY)
    assert run(engine, [request]) == [alone(request)]
    assert short.refused == [128, 64, 32]
    assert engine.stats().preemptions == 0
    assert "steps have at most 16 tokens from now on" in caplog.text
    assert run(engine, [other := make_request("b", 150, GREEDY)]) == [alone(other)]
    assert short.refused == [128, 64, 32]


def test_rows_that_fit_alone_are_computed_alone_and_later_steps_are_smaller() -> None:
    engine, short = opened(60)
    requests = [make_request(name, 50, GREEDY) for name in "ab"]
    assert run(engine, requests) == [alone(request) for request in requests]
    assert short.refused == [100]


def test_a_request_without_memory_waits_and_fails_if_it_comes_to_nothing() -> None:
    engine, short = opened(0)
    request = make_request("a", 50, GREEDY)
    engine.add(request)
    engine.step()
    short.most = 1000
    assert run(engine) == []
    assert request.output_token_ids == alone(request)
    short.most = 0
    (tokens,) = run(engine, [failed := make_request("b", 50, GREEDY)])
    assert (tokens, failed.finish_reason) == ([], "error")
    assert "too much memory" in str(failed.error)
    assert len(short.refused) < 12
    short.most = 1000
    assert run(engine, [last := make_request("c", 50, GREEDY)]) == [alone(last)]


def test_a_request_that_writes_an_answer_is_preempted_for_the_others() -> None:
    engine, short = opened(1000)
    requests = [make_request(name, 30, GREEDY) for name in "abc"]
    for request in requests:
        engine.add(request)
    while not all(len(request.output_token_ids) >= 2 for request in requests):
        engine.step()
    short.most = 0
    engine.step()
    assert engine.stats().preemptions == 3
    short.most = 40
    assert run(engine) == []
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("Failed to allocate memory for requested buffer of size 9"),
            OutOfMemoryError,
        ),
        (RuntimeError("CUDA failure 2: out of memory"), OutOfMemoryError),
        (MemoryError(), OutOfMemoryError),
        (OutOfMemoryError("none left"), OutOfMemoryError),
        (RuntimeError("CUDA failure 700: illegal address"), ProviderRuntimeError),
        (ProviderRuntimeError("lost"), ProviderRuntimeError),
    ],
)
def test_errors_of_memory_are_told_apart(error: Exception, kind: type) -> None:
    found = ort.run_error(2, error)
    assert type(found) is kind
    assert str(found).startswith("a run of 2 rows failed: ")
