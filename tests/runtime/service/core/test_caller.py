"""Budgets of API keys, by a clock of the test."""

from __future__ import annotations

import pytest

from carryall.errors import QueueFullError, RateLimitError
from carryall.runtime.service.core.caller import CALLER, Budgets, Caller, check_tokens, spend


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(budgets: Budgets) -> float:
    """Seconds after which a refused request may be sent again."""
    with pytest.raises(RateLimitError, match="requests a minute"):
        budgets.count_request()
    with pytest.raises(QueueFullError) as caught:
        budgets.count_request()
    return caught.value.retry_after


def test_requests_of_a_minute_are_limited_and_refill_evenly() -> None:
    clock = Clock()
    budgets = Budgets(requests_per_minute=3, clock=clock)
    for _ in range(3):
        budgets.count_request()
    assert refusal(budgets) == pytest.approx(20)  # a third of a minute brings one of three
    clock.now += 19
    assert refusal(budgets) == pytest.approx(1)
    clock.now += 1.001
    budgets.count_request()
    clock.now += 3600  # never more than a full bucket
    for _ in range(3):
        budgets.count_request()
    refusal(budgets)


def test_tokens_are_counted_after_use_and_paid_back() -> None:
    clock = Clock()
    budgets = Budgets(tokens_per_minute=60, tokens_per_day=200, clock=clock)
    budgets.spend(90)  # a request may use more than there is
    with pytest.raises(RateLimitError, match="60 tokens a minute") as caught:
        budgets.check_tokens()
    assert caught.value.retry_after == pytest.approx(31)  # 30 tokens below zero, and one to begin with
    clock.now += 31.001
    budgets.check_tokens()
    budgets.spend(110)
    clock.now += 112
    with pytest.raises(RateLimitError, match="200 tokens a day"):
        budgets.check_tokens()
    assert Budgets().counts_tokens is False
    assert budgets.counts_tokens


def test_the_caller_of_the_task_pays() -> None:
    check_tokens()  # nobody is limited without API keys
    spend(10**9)
    token = CALLER.set(Caller("a", budgets=Budgets(tokens_per_day=1)))
    try:
        check_tokens()
        spend(1)
        with pytest.raises(RateLimitError):
            check_tokens()
    finally:
        CALLER.reset(token)
