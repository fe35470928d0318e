"""The number of replicas follows the tokens that wait."""

from __future__ import annotations

import types

import pytest

from carryall.errors import UsageError
from carryall.runtime.cluster.autoscaling import WaitingTokens, wanted_replicas
from carryall.runtime.service.core.config import ServerConfig


@pytest.mark.parametrize(
    ("waiting", "busy", "wanted"),
    [(0, 0.0, 1), (0, 0.7, 1), (0, 0.9, 2), (7999, 0.0, 1), (8001, 0.0, 2), (40_000, 1.6, 7)],
)
def test_replicas_are_wanted_for_tokens_that_wait_and_slots_that_are_taken(
    waiting: int, busy: float, wanted: int
) -> None:
    assert wanted_replicas(waiting, busy, 8000) == wanted


def test_the_policy_reads_the_sum_of_all_replicas() -> None:
    context = types.SimpleNamespace(
        aggregated_metrics={"waiting_tokens": {"a": 9000.0, "b": 8000.0}, "busy_slots": {"a": 0.5, "b": 0.3}}
    )
    assert WaitingTokens(8000)(context) == (4, {})
    assert WaitingTokens(8000)(types.SimpleNamespace(aggregated_metrics=None)) == (1, {})


def test_fewer_at_most_than_at_least_is_refused() -> None:
    with pytest.raises(UsageError, match="less than the 3 replicas"):
        ServerConfig(ray="local", replicas=3, max_replicas=2)
    with pytest.raises(UsageError, match="without ray"):
        ServerConfig(max_replicas=2)
