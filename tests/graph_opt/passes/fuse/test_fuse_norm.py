from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.fuse.fuse_norm import FuseRMSNormPass

SIGNATURE = "g (float[B, S, 8] x) => (float[B, S, 8] y)"
W = np.linspace(0.5, 2, 8).astype(np.float32)
GIVEN = {"w": W, "two": np.float32(2), "one": np.float32(1), "eps": np.float32(1e-5), "last": np.array([-1])}


def shaped(text: str) -> str:
    return f"{SIGNATURE} <float[B, S, 1] m, float[B, S, 8] n> {{ {text} }}"


@pytest.mark.parametrize(
    "text",
    [
        "q = Pow(x, two) m = ReduceMean(q, last) a = Add(m, eps) r = Sqrt(a) n = Div(x, r) y = Mul(w, n)",
        """q = Mul(x, x) m = ReduceMean(q, last) a = Add(eps, m) r = Sqrt(a) i = Div(one, r) n = Mul(x, i)
           y = Mul(n, w)""",
        """q = Pow(x, two) m = ReduceMean(q, last) a = Add(m, eps) r = Sqrt(a) i = Reciprocal(r) n = Mul(i, x)
           y = Mul(n, w)""",
    ],
    ids=["divided", "multiplied by the inverse", "reciprocal"],
)
def test_every_written_form_becomes_one_norm(text: str) -> None:
    model = graph(shaped(text), **GIVEN)
    assert apply(FuseRMSNormPass(), model) == []
    expected = "y = RMSNormalization <axis = -1, epsilon = 1e-5> (x, w)"
    assert_same(model, graph(f"{SIGNATURE} {{ {expected} }}", w=W))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "q = Pow(x, two) m = ReduceMean(q, last) a = Add(m, one) r = Sqrt(a) n = Div(x, r) y = Mul(w, n)",
            "the nodes after the mean of squares do not compute an RMS norm",
        ),
        (
            "q = Pow(x, two) m = ReduceMean(q, last) a = Add(m, eps) n = Div(x, a) y = Mul(w, n)",
            "the nodes after the mean of squares do not compute an RMS norm",
        ),
    ],
    ids=["a large epsilon", "no root"],
)
def test_what_is_no_norm_stays_and_says_why(text: str, reason: str) -> None:
    model = graph(shaped(text), **GIVEN)
    before = len(model.graph)
    assert apply(FuseRMSNormPass(), model) == [reason]
    assert len(model.graph) == before
