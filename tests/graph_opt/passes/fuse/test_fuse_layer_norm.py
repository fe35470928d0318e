from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.fuse.fuse_layer_norm import FuseLayerNormPass
from carryall.graph_opt.passes.fuse.fuse_norm import FuseRMSNormPass

SIGNATURE = (
    "g (float[B, S, 8] x) => (float[B, S, 8] y) <float[B, S, 1] v, float[B, S, 8] d, float[B, S, 8] n>"
)
W = np.linspace(0.5, 2, 8).astype(np.float32)
GIVEN = {"w": W, "b": W - 1, "two": np.float32(2), "eps": np.float32(1e-5), "last": np.array([-1])}
MEAN = "m = ReduceMean(x, last) d = Sub(x, m)"
ROOT = "v = ReduceMean(q, last) a = Add(v, eps) r = Sqrt(a)"


@pytest.mark.parametrize(
    "text",
    [
        f"{MEAN} q = Pow(d, two) {ROOT} n = Div(d, r) s = Mul(n, w) y = Add(s, b)",
        f"{MEAN} q = Mul(d, d) {ROOT} i = Reciprocal(r) n = Mul(d, i) s = Mul(w, n) y = Add(b, s)",
    ],
)
def test_a_decomposed_layer_norm_is_fused(text: str) -> None:
    model = graph(f"{SIGNATURE} {{ {text} }}", **GIVEN)
    assert apply(FuseRMSNormPass(), model) == []
    assert apply(FuseLayerNormPass(), model) == []
    after = "y = LayerNormalization <axis = -1, epsilon = 1e-5> (x, w, b)"
    assert_same(model, graph(f"g (float[B, S, 8] x) => (float[B, S, 8] y) {{ {after} }}", w=W, b=W - 1))


def test_a_norm_of_another_difference_stays() -> None:
    """The subtracted mean is over the first axis."""
    text = f"{MEAN.replace('last', 'first')} q = Pow(d, two) {ROOT} n = Div(d, r) y = Mul(n, w)"
    model = graph(f"{SIGNATURE} {{ {text} }}", first=np.array([0]), **GIVEN)
    apply(FuseRMSNormPass(), model)
    apply(FuseLayerNormPass(), model)
    assert [node.op_type for node in model.graph] == ["ReduceMean", "Sub", "RMSNormalization"]
