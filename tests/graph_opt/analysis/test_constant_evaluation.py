"""What is computed ahead of time is what ONNX's evaluator computes, or it is left to the runtime."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import evaluate

from carryall.graph_opt.analysis.constant_evaluation import content_of

INT, BYTE, FLOAT, BOOL = (partial(np.asarray, dtype=kind) for kind in ("int64", "uint8", "float32", "bool"))


def compute(op_type: str, *operands: Any, **attributes: Any) -> tuple[Any, Any]:
    """Return what a node is computed to be ahead of time, and by ONNX's evaluator."""
    arrays = [np.asarray(operand) for operand in operands]
    inputs = [ir.val(f"i{n}", ir.DataType.from_numpy(x.dtype), x.shape) for n, x in enumerate(arrays)]
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name, shapes = "y", [array.shape for array in arrays]
    model = ir.Model(
        ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 23}, name="g"), ir_version=11
    )
    with np.errstate(all="ignore"):
        expected = evaluate(model, {str(x.name): array for x, array in zip(inputs, arrays, strict=True)})[0]
    return content_of(node, arrays, shapes), expected


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes"),
    [
        ("Div", [INT([2**62 + 1, -7, 7, -8]), INT([1, 2, -2, 2])], {}),
        ("Div", [BYTE([200, 7]), BYTE([3, 2])], {}),
        ("Div", [FLOAT([1, 0, -1]), FLOAT([0, 0, 0])], {}),
        ("Cast", [FLOAT([1.9, -1.9, 0.5])], {"to": 7}),
        ("Cast", [FLOAT([1.9, np.nan, 0])], {"to": 9}),
        ("Cast", [FLOAT([1e6, np.inf, 1 / 3])], {"to": 10}),
        ("Cast", [FLOAT([1 / 3, -np.inf])], {"to": 16}),
        ("ReduceProd", [FLOAT([2, 3, 4]), INT([])], {"keepdims": 0}),
        ("ReduceProd", [FLOAT([2, 3, 4]), INT([])], {"noop_with_empty_axes": 1}),
        ("ReduceMax", [INT([[2, 3], [9, 4]]), INT([-1])], {"keepdims": 0}),
        ("ReduceMin", [INT([[2, 3], [9, 4]])], {}),
        ("NonZero", [BOOL([[True, False], [True, True]])], {}),
        ("Slice", [INT([1, 2, 3]), INT([-1]), INT([-(2**62)]), INT([0]), INT([-1])], {}),
        ("Slice", [INT([1, 2, 3]), INT([9]), INT([-4]), INT([0]), INT([-2])], {}),
        ("Slice", [INT([1, 2, 3]), INT([-9]), INT([9]), INT([0]), INT([2])], {}),
        ("Max", [FLOAT([np.nan, -np.inf]), FLOAT([1, -1])], {}),
        ("Expand", [FLOAT([-0.0, np.nan]), INT([2, 1])], {}),
        ("Where", [BOOL([True, False]), FLOAT([np.nan, 1]), FLOAT([2, -0.0])], {}),
        ("Squeeze", [INT([[[1], [2]]]), INT([0, -1])], {}),
        ("Reshape", [INT([[1, 2, 3]]), INT([0, -1])], {}),
        ("Range", [INT(5), INT(-4), INT(-3)], {}),
        ("Pow", [INT([3, 2]), FLOAT([0.5, 2])], {}),
        ("Shape", [INT([[1, 2, 3]])], {"start": -1}),
    ],
)
def test_the_evaluator_agrees(op_type: str, operands: list[Any], attributes: dict[str, Any]) -> None:
    found, expected = compute(op_type, *operands, **attributes)
    assert found is not None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


def node(op_type: str, count: int, **attributes: Any) -> ir.Node:
    return ir.node(op_type, [ir.val(f"i{number}") for number in range(count)], attributes)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes"),
    [
        ("Div", [INT([1]), INT([0])], {}),
        ("Cast", [FLOAT([300])], {"to": 2}),
        ("Cast", [FLOAT([-1])], {"to": 2}),
        ("Cast", [FLOAT([np.nan])], {"to": 7}),
        ("Cast", [FLOAT([2.0**63])], {"to": 7}),
        ("Cast", [FLOAT([1e6])], {"to": 17}),
        ("Cast", [FLOAT([1.5])], {"to": 8}),
        ("Cast", [np.array([1], ml_dtypes.float8_e4m3fn)], {"to": 1}),
        ("Slice", [INT([1, 2, 3]), INT([-9]), INT([-9]), INT([0]), INT([-1])], {}),
        ("Gather", [INT([1, 2]), INT([5])], {}),
        ("Range", [INT(0), INT(10**9), INT(1)], {}),
        ("Pow", [INT([2]), INT([-1])], {}),
    ],
)
def test_what_runtimes_do_otherwise_is_left_to_them(
    op_type: str, operands: list[Any], attributes: dict[str, Any]
) -> None:
    shapes = [operand.shape for operand in map(np.asarray, operands)]
    arrays = [np.asarray(operand) for operand in operands]
    assert content_of(node(op_type, len(arrays), **attributes), arrays, shapes) is None
