from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph
from onnx_ir.passes import common

from carryall.graph_opt.lower.norms.skip_norm import SkipNormPass

W = np.ones(4, np.float32)
SIGNATURE = "g (float[B, S, 4] a, float[B, S, 4] b) => (float[B, S, 4] y, float[B, S, 4] total)"


def test_rms_norm_of_a_sum() -> None:
    body = "total = Add(a, b) y = RMSNormalization <axis = -1, epsilon = 1e-6> (total, w)"
    model = graph(f"{SIGNATURE} {{ {body} }}", w=W)
    assert apply(SkipNormPass(), model) == []
    fused = "y, m, v, total = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (a, b, w)"
    assert_same(model, graph(f"{SIGNATURE} {{ {fused} }}", w=W))


def test_layer_norm_of_a_sum_keeps_its_bias() -> None:
    body = "total = Add(a, b) y = LayerNormalization <axis = 2, epsilon = 1e-5> (total, w, beta)"
    model = graph(f"{SIGNATURE} {{ {body} }}", w=W, beta=2 * W)
    assert apply(SkipNormPass(), model) == []
    fused = "y, m, v, total = com.microsoft.SkipLayerNormalization <epsilon = 1e-5> (a, b, w, beta)"
    assert_same(model, graph(f"{SIGNATURE} {{ {fused} }}", w=W, beta=2 * W))


def test_readers_of_the_sum_before_the_norm_still_come_after_it() -> None:
    body = "t = Add(a, b) total = Neg(t) y = RMSNormalization <axis = -1> (t, w)"
    model = graph(f"{SIGNATURE} {{ {body} }}", w=W)
    apply(SkipNormPass(), model)
    assert [node.op_type for node in model.graph] == ["SkipSimplifiedLayerNormalization", "Neg"]
    common.CheckerPass()(model)


@pytest.mark.parametrize(
    ("signature", "norm", "reason"),
    [
        (
            "g (float[B, S, 4] a, float[1, S, 4] b) => (float[B, S, 4] y)",
            "RMSNormalization <axis = -1> (total, w)",
            "must be known and equal",
        ),
        (
            "g (float[B, S, 4] a) => (float[B, S, 4] y)",
            "RMSNormalization <axis = -1> (total, w)",
            "it adds a weight",
        ),
        (
            "g (float[B, 2, 4] a, float[B, 2, 4] b) => (float[B, 2, 4] y)",
            "RMSNormalization <axis = 1> (total, two)",
            "other axes than the last",
        ),
    ],
    ids=["a summand is broadcast", "a summand is a weight", "two axes are normalised"],
)
def test_what_the_kernel_does_not_compute_stays(signature: str, norm: str, reason: str) -> None:
    text = f"{signature} {{ total = Add(a, b) y = {norm} }}"
    constants = {"w": W, "two": np.ones((2, 4), np.float32)} | ({} if ", float" in signature else {"b": W})
    model = graph(text, **constants)
    (refusal,) = apply(SkipNormPass(), model)
    assert reason in refusal
    assert [node.op_type for node in model.graph] == ["Add", "RMSNormalization"]


def test_a_norm_of_something_else_is_no_near_miss() -> None:
    model = graph("g (float[B, 4] a) => (float[B, 4] y) { y = RMSNormalization <axis = -1> (a, w) }", w=W)
    assert apply(SkipNormPass(), model) == []
