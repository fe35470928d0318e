"""Nodes that mix tokens are refused; the token axis is followed through nodes that do not."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import graph

from carryall.graph_opt.analysis.token_axes import Mixed, TokenAxes

GIVEN = {
    "table": np.ones((9, 4), np.float32),
    "w": np.ones((4, 4), np.float32),
    "cube": np.ones((1, 4, 4), np.float32),
    "first": np.array([0]),
    "one": np.array([1]),
    "two": np.array([2]),
    "four": np.array([4]),
    "rows": np.array([-1, 4]),
}
BACK = "shape = Shape(input_ids) target = Concat <axis = 0> (shape, four)"


def walk(body: str) -> TokenAxes:
    text = f"""g (int64[b, s] input_ids, int64[b, t] attention_mask) => (float[b, s, 4] logits)
        {{ x = Gather(table, input_ids) {body} }}"""
    return TokenAxes(graph(text, **GIVEN).graph)


@pytest.mark.parametrize(
    "body",
    [
        "logits = Concat <axis = 1> (x, x)",
        "m = ReduceMean <keepdims = 1> (x, one) logits = Add(x, m)",
        "m = ReduceMean(x) logits = Add(x, m)",
        "logits = Softmax <axis = 1> (x)",
        "logits = Gather <axis = 1> (x, first)",
        "logits = Slice(x, first, one, one)",
        "c = Cast <to = 1> (attention_mask) u = Unsqueeze(c, two) logits = Mul(x, u)",
        "logits = CumSum(x, one)",
        "t = Transpose <perm = [0, 2, 1]> (x) p = MatMul(x, t) logits = MatMul(p, x)",
        "logits = MatMul(x, cube)",
        f"r = Reshape(x, rows) t = Transpose <perm = [1, 0]> (r) {BACK} logits = Reshape(t, target)",
        f"t = Transpose <perm = [0, 2, 1]> (x) {BACK} logits = Reshape(t, target)",
        f"t = Transpose <perm = [1, 0, 2]> (x) r = Reshape(t, rows) {BACK} logits = Reshape(r, target)",
        "r = Reshape(x, rows) logits = Gemm <transA = 1> (r, r)",
        "logits = RMSNormalization <axis = 1> (x, w)",
        "e = Cast <to = 1> (input_ids) logits = Unsqueeze(e, first)",
    ],
)
def test_what_mixes_tokens_is_refused(body: str) -> None:
    with pytest.raises(Mixed):
        walk(body)


@pytest.mark.parametrize(
    "body",
    [
        "m = ReduceMean <keepdims = 1> (x, two) logits = Sub(x, m)",
        f"r = Reshape(x, rows) p = Gemm(r, w) {BACK} logits = Reshape(p, target)",
        "t = Transpose <perm = [1, 0, 2]> (x) u = Neg(t) logits = Transpose <perm = [1, 0, 2]> (u)",
        "c = Concat <axis = 2> (x, x) logits = Slice(c, first, four, two)",
    ],
)
def test_what_treats_each_by_itself_is_followed(body: str) -> None:
    walk(body)
