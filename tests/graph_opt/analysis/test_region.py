"""Extraction and strict comparison of regions, which decide what passes replace."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import graph

from carryall.graph_opt.analysis.region import Region, close, region

W = {"w": np.ones(3, np.float32), "large": np.ones((300, 300), np.float32), "two": np.float32(2)}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (np.ones((1, 3)), np.ones((2, 3))),
        (np.ones(()), np.ones(3)),
        (np.array([1, np.nan]), np.array([1, 1])),
        (np.array([1, 1.0001]), np.array([1, 1])),
    ],
    ids=["broadcast", "a scalar", "no number", "off by 1e-4"],
)
def test_values_that_are_not_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert close(expected, expected)
    assert not close(found, expected)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("t = Add(x, z) y = Neg(t)", "it also depends on z"),
        ("t = MatMul(x, large) y = Neg(t)", "it also depends on large"),
        ("t = com.microsoft.Gelu(x) y = Neg(t)", "it contains com.microsoft.Gelu"),
        ("y = Identity(x)", None),
    ],
)
def test_region_boundaries(body: str, reason: str | None) -> None:
    model = graph(f"g (float[2, 300] x, float[2, 300] z) => (float[2, 300] y) {{ {body} }}", **W)
    found = region([model.graph.inputs[0]], model.graph.outputs[0])
    assert isinstance(found, Region) if reason is None else found == reason


def test_a_region_of_too_many_nodes_is_refused() -> None:
    model = graph("g (float[3] x) => (float[3] y) { a = Neg(x) b = Neg(a) y = Neg(b) }")
    assert region([model.graph.inputs[0]], model.graph.outputs[0], max_nodes=2) == "it is too large"


def test_invalid_inputs_give_a_failure_with_a_reason() -> None:
    model = graph("g (float[3] x) => (float[3] y) { y = Mul(x, w) }", **W)
    found = region([model.graph.inputs[0]], model.graph.outputs[0])
    assert isinstance(found, Region)
    assert found(np.ones(2, np.float32)).size == 0
    assert str(found.failure).startswith("it cannot be evaluated on probe inputs")
