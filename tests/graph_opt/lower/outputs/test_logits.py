from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.errors import GraphError
from carryall.graph_opt.lower.outputs.logits import SelectLogitsPass

W = np.arange(8, dtype=np.float32).reshape(4, 2)
BEFORE = "g (float[B, S, 4] x) => (float[B, S, 2] logits)"
AFTER = "g (float[B, S, 4] x, int64[batch, wanted] logits_positions) => (float[batch, wanted, 2] logits)"
NORM = "h = RMSNormalization(x, scale)"
CHOOSE = "i = Unsqueeze(logits_positions, last) c = GatherND <batch_dims = 1> (h, i)"
CONSTANTS = {"w": W, "scale": np.ones(4, np.float32), "last": np.array([-1])}


def test_an_untied_head_computes_only_the_wanted_rows() -> None:
    model = graph(f"{BEFORE} {{ {NORM} logits = MatMul(h, w) }}", **CONSTANTS)
    assert apply(SelectLogitsPass(), model) == []
    assert_same(model, graph(f"{AFTER} {{ {NORM} {CHOOSE} logits = MatMul(c, w) }}", **CONSTANTS))


def test_nodes_after_the_head_compute_only_the_wanted_rows() -> None:
    """A soft cap is such a node."""
    constants = {**CONSTANTS, "cap": np.float32(30)}
    after = "d = Div(m, cap) t = Tanh(d) logits = Mul(t, cap)"
    model = graph(f"{BEFORE} {{ {NORM} m = MatMul(h, w) {after} }}", **constants)
    apply(SelectLogitsPass(), model)
    assert_same(model, graph(f"{AFTER} {{ {NORM} {CHOOSE} m = MatMul(c, w) {after} }}", **constants))


def test_a_tied_head_is_reshaped_to_the_wanted_rows() -> None:
    """Its target shape is computed from the whole sequence."""
    constants = {
        **CONSTANTS,
        "v": W.T,
        "rows": np.array([-1, 4]),
        "size": np.array([2]),
        "rest": np.array([-1]),
    }
    gemm = "m = Reshape({}, rows) n = Gemm <transB = 1> (m, v)"
    whole = "d = Shape <end = 2> (x) e = Concat <axis = 0> (d, size) logits = Reshape(n, e)"
    model = graph(f"{BEFORE} {{ {NORM} {gemm.format('h')} {whole} }}", **constants)
    apply(SelectLogitsPass(), model)
    wanted = "d = Shape <start = 0, end = 2> (c) e = Concat <axis = 0> (d, rest) logits = Reshape(n, e)"
    assert_same(model, graph(f"{AFTER} {{ {NORM} {CHOOSE} {gemm.format('c')} {wanted} }}", **constants))


def test_both_products_of_a_head_with_block_minima_read_the_wanted_rows() -> None:
    constants = {
        **CONSTANTS,
        "blocks": np.array([0, 0, 2, 2]),
        "minima": np.ones((2, 2), np.float32),
    }
    split = """p = Reshape({0}, blocks) s = ReduceSum <keepdims = 0> (p, last) m = MatMul({0}, w)
        o = MatMul(s, minima) logits = Add(m, o)"""
    model = graph(f"{BEFORE} {{ {NORM} {split.format('h')} }}", **constants)
    assert apply(SelectLogitsPass(), model) == []
    assert_same(model, graph(f"{AFTER} {{ {NORM} {CHOOSE} {split.format('c')} }}", **constants))


def test_a_graph_without_logits_is_no_decoder() -> None:
    with pytest.raises(GraphError, match="no output 'logits'"):
        SelectLogitsPass()(graph("g (float[B] x) => (float[B] y) { y = Neg(x) }"))


def test_logits_without_a_head_are_an_error() -> None:
    with pytest.raises(GraphError, match="no head was found"):
        SelectLogitsPass()(graph("g (float[B, S, 4] x) => (float[B, S, 4] logits) { logits = Softmax(x) }"))
