from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph
from onnx.reference import ReferenceEvaluator

from carryall.graph_opt.lower.products.block_minima import SplitMinimaPass, weight_with_minima
from carryall.graph_opt.lower.products.merge import MergeProjectionsPass

BLOCK, BLOCKS, OUTPUTS = 16, 3, 6
INPUTS = BLOCK * BLOCKS


def constants(axis: int, outputs: int = OUTPUTS, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Values, scales, zero points and minima of a random weight, and the shapes of the two reshapes."""
    rng = np.random.default_rng(seed)
    whole, small = (INPUTS, outputs), (BLOCKS, outputs)
    apart, offsets = (BLOCKS, BLOCK, outputs), (BLOCKS, 1, outputs)
    if axis == 1:
        whole, small, apart = whole[::-1], small[::-1], (outputs, BLOCKS, BLOCK)
        offsets = (outputs, BLOCKS, 1)
    return {
        "v": rng.integers(0, 256, whole, np.uint8),
        "s": rng.random(small, np.float32),
        "z": np.zeros(small, np.uint8),
        "m": rng.standard_normal(offsets, np.float32),
        "apart": np.array(apart),
        "whole": np.array(whole),
    }


def weight_text(name: str, axis: int, suffix: str = "") -> str:
    s = suffix
    return f"""d{s} = DequantizeLinear <axis = {axis}, block_size = {BLOCK}> (v{s}, s{s}, z{s})
        r{s} = Reshape(d{s}, apart{s}) a{s} = Add(r{s}, m{s}) {name} = Reshape(a{s}, whole{s})"""


def run(model: ir.Model, **feeds: npt.NDArray[Any]) -> npt.NDArray[Any]:
    outputs = ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)
    return np.asarray(next(iter(outputs)))


CASES = {
    "MatMul": (f"g (float[B, S, {INPUTS}] x) => (float[B, S, {OUTPUTS}] y)", "y = MatMul(x, w)", 0),
    "Gemm": (f"g (float[B, {INPUTS}] x) => (float[B, {OUTPUTS}] y)", "y = Gemm <transB = 1> (x, w)", 1),
    "Gather": (f"g (int64[B, S] x) => (float[B, S, {INPUTS}] y)", "y = Gather <axis = 0> (w, x)", 1),
}


@pytest.mark.parametrize("op_type", CASES)
def test_the_minima_are_computed_apart(op_type: str) -> None:
    signature, text, axis = CASES[op_type]
    model = graph(f"{signature} {{ {weight_text('w', axis)} {text} }}", **constants(axis))
    rng = np.random.default_rng(1)
    shapes = {"MatMul": (2, 5, INPUTS), "Gemm": (4, INPUTS)}
    x = (
        rng.standard_normal(shapes[op_type]).astype(np.float32)
        if op_type in shapes
        else rng.integers(0, 6, (2, 3))
    )
    expected = run(model, x=x)

    pass_ = SplitMinimaPass()
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    nodes = [node for node in model.graph if node.op_type == op_type]
    assert len(nodes) == 2
    assert all(weight_with_minima(value) is None for node in nodes for value in node.inputs)
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == 1
    np.testing.assert_allclose(run(model, x=x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_products_of_one_input_share_its_sums() -> None:
    signature, _, _ = CASES["MatMul"]
    both = {**constants(0), **{f"{key}2": value for key, value in constants(0, seed=2).items()}}
    body = f"{weight_text('w', 0)} {weight_text('u', 0, '2')} p = MatMul(x, w) q = MatMul(x, u) y = Add(p, q)"
    model = graph(f"{signature} {{ {body} }}", **both)
    apply(SplitMinimaPass(), model)
    assert [node.op_type for node in model.graph].count("ReduceSum") == 1


def test_weights_with_minima_are_merged_and_then_split() -> None:
    signature, _, _ = CASES["MatMul"]
    both = {**constants(0), **{f"{key}2": value for key, value in constants(0, seed=2).items()}}
    body = f"{weight_text('w', 0)} {weight_text('u', 0, '2')} p = MatMul(x, w) q = MatMul(x, u) y = Sub(p, q)"
    model = graph(f"{signature} {{ {body} }}", **both)
    x = np.random.default_rng(1).standard_normal((2, 5, INPUTS)).astype(np.float32)
    expected = run(model, x=x)
    merge = MergeProjectionsPass()
    assert apply(merge, model) == []
    assert merge.fired == 1
    apply(SplitMinimaPass(), model)
    counts = [node.op_type for node in model.graph]
    assert (counts.count("DequantizeLinear"), counts.count("MatMul"), counts.count("Split")) == (1, 2, 1)
    np.testing.assert_allclose(run(model, x=x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


SQUARE = CASES["MatMul"][0].replace(str(OUTPUTS), str(INPUTS))


@pytest.mark.parametrize(
    ("signature", "text", "axis", "reason"),
    [
        (
            CASES["MatMul"][0].replace(str(OUTPUTS), str(INPUTS)),
            "y = MatMul(x, w)",
            1,
            "blocked along its other axis",
        ),
        (CASES["Gemm"][0], "y = Gemm <transB = 1, alpha = 2.0> (x, w)", 1, "does more than a product"),
    ],
)
def test_what_is_refused(signature: str, text: str, axis: int, reason: str) -> None:
    outputs = INPUTS if "other axis" in reason else OUTPUTS
    model = graph(f"{signature} {{ {weight_text('w', axis)} {text} }}", **constants(axis, outputs))
    refusals = apply(SplitMinimaPass(), model)
    assert len(refusals) == 1
    assert reason in str(refusals[0])
