from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph
from onnx_ir.passes import common

from carryall.graph_opt.passes.fuse.head_norms import HeadNormsPass

GIVEN = {
    "scale": np.arange(1, 5, dtype=np.float32), "rows": np.array([0, -1, 4]), "back": np.array([0, -1, 8]),
    "heads": np.array([0, 0, 2, 4]), "joined": np.array([0, 0, 8]), "other": np.array([-1, 1, 8]),
}  # fmt: skip


def norm(body: str) -> ir.Model:
    model = graph(f"g (float[b, s, 8] x) => (float[b, s, 8] y) {{ {body} }}", **GIVEN)
    common.ShapeInferencePass()(model)
    return model


@pytest.mark.parametrize("axis", ["", "<axis = -1>", "<axis = 2>"])
def test_heads_get_a_separate_axis(axis: str) -> None:
    body = f"r = Reshape(x, rows) n = RMSNormalization {axis} (r, scale) y = Reshape(n, back)"
    model = norm(body)
    assert apply(HeadNormsPass(), model) == []
    expected = "h = Reshape(x, heads) n = RMSNormalization <axis = -1> (h, scale) y = Reshape(n, joined)"
    assert_same(model, norm(expected))
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)}
    np.testing.assert_allclose(evaluate(model, feed)[0], evaluate(norm(body), feed)[0], rtol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "h = Reshape(x, heads) n = RMSNormalization <axis = -1> (h, scale) y = Reshape(n, joined)",
        "r = Reshape(x, rows) n = RMSNormalization <axis = -1> (r, scale) e = Exp(n) y = Reshape(e, back)",
    ],
    ids=["canonical", "something between"],
)
def test_other_norms_stay(body: str) -> None:
    model = norm(body)
    apply(HeadNormsPass(), model)
    assert_same(model, norm(body))
