"""Values between products become whole blocks, and results stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.graph.edit import weight
from carryall.graph_opt.graph.lazy import shape_of
from carryall.graph_opt.lower.products.padded_products import PaddedProductsPass

GATED = """g
    (float[N, 16] x, float[16, 20] wg, float[16, 20] wu, float[20] b, float[20, 4] wd) => (float[N, 4] y) {
    g = MatMul(x, wg) gb = Add(g, b) s = Sigmoid(gb) a = Mul(gb, s)
    u = MatMul(x, wu) h = Mul(a, u) y = MatMul(h, wd) }"""
PLAIN = """g (float[N, 16] x, float[16, 20] wu, float[20] b, float[20, 4] wd) => (float[N, 4] y) {
    u = MatMul(x, wu) ub = Add(u, b) h = Gelu(ub) y = MatMul(h, wd) }"""


def filled(text: str) -> ir.Model:
    """Return a graph whose inputs behind the first one are random weights."""
    model, rng = graph(text), np.random.default_rng(3)
    for value in list(model.graph.inputs)[1:]:
        assert value.shape is not None
        array = rng.standard_normal(value.shape.numpy()).astype(np.float32)
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    return model


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("text", [GATED, PLAIN])
def test_inner_sizes_become_whole_blocks_with_the_same_results(text: str) -> None:
    model, x = filled(text), np.random.default_rng(4).standard_normal((5, 16)).astype(np.float32)
    before = run(model, x)
    pass_ = PaddedProductsPass(16)
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    found = (weight(node.inputs[1]) for node in model.graph if node.op_type == "MatMul")
    sizes = [shape_of(each) for each in found if each is not None]
    assert sizes == [(16, 32)] * (len(sizes) - 1) + [(32, 4)]
    np.testing.assert_allclose(run(model, x), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PLAIN.replace("(float[N, 4] y)", "(float[N, 4] y, float[N, 20] h)"), "not computed by a product"),
        (PLAIN.replace("Gelu(ub)", "Softmax(ub)"), "Softmax is in front of it"),
        (PLAIN.replace("y = MatMul(h, wd)", "z = MatMul(h, wd) r = ReduceSum(ub) y = Add(z, r)"),
         "something else reads its inputs"),
    ],
)  # fmt: skip
def test_what_is_read_elsewhere_or_mixes_elements_stays(text: str, reason: str) -> None:
    model, pass_ = filled(text), PaddedProductsPass(16)
    refusals = apply(pass_, model)
    assert pass_.fired == 0
    assert any(reason in str(refusal) for refusal in refusals)


def test_whole_blocks_stay() -> None:
    model, pass_ = filled(PLAIN), PaddedProductsPass(4)
    assert apply(pass_, model) == []
    assert pass_.fired == 0
