"""A pytest plugin: tests in random order. The seed is CARRYALL_TEST_SEED; workers of xdist agree on it."""

from __future__ import annotations

import os
import random

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle modules, and tests within each module, so that module fixtures are made once."""
    rng = random.Random(int(os.environ.get("CARRYALL_TEST_SEED", "0")))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    groups = list(modules.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    items[:] = [item for group in groups for item in group]
