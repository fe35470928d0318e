"""Dynamic quantization: what its rounding alone costs passes ``verify``, a wrong rewrite does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.graph_opt.compare.bars import Bars
from carryall.graph_opt.compare.verify import verify

Array = npt.NDArray[Any]
LAYERS, SIZE = 10, 64
# Other orders of products change inputs by some units in the last place.
MOVED = 1 + 3e-6 * np.random.default_rng(3).standard_normal(SIZE)


def dynamic_net(
    gain: float | Array = 1.0,
    weight: Callable[[Array], Array] = lambda array: array,
    *,
    stale: bool = False,
) -> ir.Model:
    """Return layers of dynamically quantized products, whose roundings later layers amplify.

    Args:
        gain: factor of each layer's input.
        weight: changes the integers of the first layer.
        stale: whether the last layer multiplies by the scale of the one before.
    """
    rng = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", SIZE])
    nodes: list[ir.Node] = []
    held: list[ir.Value] = []

    def const(array: Array) -> ir.Value:
        value = ir.Value(name=f"c{len(held)}", const_value=ir.tensor(array))
        held.append(value)
        return value

    def op(kind: str, *operands: ir.Value, outputs: int = 1, **attributes: int) -> list[ir.Value]:
        nodes.append(ir.node(kind, operands, attributes, num_outputs=outputs))
        for index, value in enumerate(nodes[-1].outputs):
            value.name = f"{kind}{len(nodes)}_{index}"
        return list(nodes[-1].outputs)

    y, factor, before = x, const(np.array(gain, np.float32)), x
    for layer in range(LAYERS):
        (y,) = op("Mul", y, factor)
        integers = rng.integers(-60, 60, (SIZE, SIZE)).astype(np.int8)
        small, scale, zero = op("DynamicQuantizeLinear", y, outputs=3)
        integers = weight(integers) if layer == 0 else integers
        (total,) = op("MatMulInteger", small, const(integers), zero, const(np.array(1, np.int8)))
        (floats,) = op("Cast", total, to=int(ir.DataType.FLOAT))
        used, before = (before if stale and layer == LAYERS - 1 else scale), scale
        (both,) = op("Mul", used, const(np.array(0.006, np.float32)))
        (y,) = op("Mul", floats, both)
        (y,) = op("Sin", y)
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape(["rows", SIZE])
    graph = ir.Graph([x], [y], nodes=nodes, initializers=held, opset_imports={"": 21}, name="dynamic")
    return ir.Model(graph, ir_version=10)


def test_flipped_roundings_pass() -> None:
    report = verify(dynamic_net(), dynamic_net(MOVED))
    report.check()
    assert report.exact is not None
    assert report.exact.passed
    assert report.max_rel > 10 * report.outputs["y"].bar
    assert "its dynamic quantization alone changes" in report.text()


def one_more(weights: Array) -> Array:
    changed = weights.copy()
    changed[3, 5] += 1
    return changed


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        dynamic_net(1.01),
        dynamic_net(weight=one_more),
        dynamic_net(weight=lambda weights: np.ascontiguousarray(weights[::-1])),
        dynamic_net(stale=True),
    ],
    ids=["gain", "weight", "rows", "scale"],
)
def test_a_wrong_rewrite_fails_without_rounding_too(wrong: ir.Model) -> None:
    report = verify(dynamic_net(), wrong)
    assert not report.passed
    assert any("with products in float32" in failure for failure in report.failures)


def test_a_limit_of_the_caller_is_kept() -> None:
    report = verify(dynamic_net(), dynamic_net(MOVED), bars=Bars(max_error=1e-3))
    assert not report.passed
    assert report.exact is None


def read_twice(model: ir.Model) -> ir.Model:
    """Return the graph with the integers of its first input as an output too."""
    quantized = next(node for node in model.graph if node.op_type == "DynamicQuantizeLinear").outputs[0]
    cast = ir.node("Cast", [quantized], {"to": int(ir.DataType.FLOAT)})
    model.graph.append(cast)
    cast.outputs[0].name, cast.outputs[0].dtype = "integers", ir.DataType.FLOAT
    model.graph.outputs.append(cast.outputs[0])
    return model


def test_integers_that_others_read_are_not_left_out() -> None:
    report = verify(read_twice(dynamic_net()), read_twice(dynamic_net(1.01)))
    assert not report.passed
    assert report.exact is None
