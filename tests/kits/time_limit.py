"""A plugin of pytest: skip what is left ``CARRYALL_TEST_SECONDS`` after the first test began."""

from __future__ import annotations

import os
import time

import pytest

_SECONDS = float(os.environ["CARRYALL_TEST_SECONDS"])
_began: list[float] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late."""
    _began.append(time.monotonic())
    if _began[-1] > _began[0] + _SECONDS:
        pytest.skip("the time of this run is over")
