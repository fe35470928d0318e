"""Weights of 8-bit floats become int8 in blocks."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from carryall.graph_opt.graph.edit import nodes_of, weight
from carryall.graph_opt.lower.products.dequantize_weights import dequantized
from carryall.graph_opt.lower.products.float8_weights import Float8WeightsPass


def product(shape: tuple[int, int], axis: int, block: int) -> ir.Model:
    """Return x @ W, or x @ W.T, with W of 8-bit floats."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 50, shape).astype(ml_dtypes.float8_e4m3fn)
    small = tuple(-(-size // block) if i == axis else size for i, size in enumerate(shape))
    scales = rng.uniform(1e-3, 1e-2, small).astype(np.float32)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", shape[0]])
    operands = [
        ir.val("w.values", const_value=ir.tensor(values, name="w.values")),
        ir.val("w.scales", const_value=ir.tensor(scales, name="w.scales")),
    ]
    node = ir.node("DequantizeLinear", operands, {"axis": axis, "block_size": block})
    multiply = ir.node("MatMul", [x, node.outputs[0]])
    graph = ir.Graph(
        [x], multiply.outputs, nodes=[node, multiply], opset_imports={"": 23}, initializers=operands
    )
    return ir.Model(graph, ir_version=11)


def matrix(model: ir.Model) -> np.ndarray:
    node = next(iter(nodes_of(model.graph, "DequantizeLinear")))
    tensors = [tensor for value in node.inputs if (tensor := weight(value)) is not None]
    return dequantized(node, tensors).numpy()


@pytest.mark.parametrize(("shape", "axis", "block"), [((64, 48), 0, 16), ((64, 96), 1, 96), ((48, 8), 0, 48)])
def test_the_error_is_at_most_a_level(
    shape: tuple[int, int], axis: int, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = product(shape, axis, block)
    before = matrix(model)
    with caplog.at_level(logging.WARNING):
        result = Float8WeightsPass()(model)
    assert result.modified
    assert "1 weights of 8-bit floats are computed as int8" in caplog.text
    node = next(iter(nodes_of(model.graph, "DequantizeLinear")))
    values = weight(node.inputs[0])
    assert values is not None
    assert values.dtype == ir.DataType.INT8
    size = node.attributes["block_size"].as_int()
    after, rows = matrix(model), before if axis == 1 else before.T
    blocks = rows.reshape(rows.shape[0], -1, size)
    error = np.abs((after if axis == 1 else after.T).reshape(blocks.shape) - blocks)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    assert 0 < (error / largest).max() <= 1 / 128 + 2**-11  # a level, and a scale of 16 bits


def test_inputs_that_no_block_divides_stay_floats() -> None:
    model = product((20, 8), 0, 20)
    lowering = Float8WeightsPass()
    assert not lowering(model).modified
    assert [one.reason for one in lowering.refusals] == ["no size of blocks divides its inputs"]
