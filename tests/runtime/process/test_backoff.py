"""A service that fails is left alone, longer each time, until it works again."""

from __future__ import annotations

from carryall.runtime.process.backoff import Backoff


def test_pauses_double_up_to_a_minute_and_end_with_success() -> None:
    now = 100.0
    backoff = Backoff(lambda: now)
    assert not backoff.paused
    assert [backoff.failed() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    now += 59.9
    assert backoff.paused
    now += 0.2
    assert not backoff.paused
    backoff.succeeded()
    assert backoff.failed() == 1.0
