"""Tests of the report of weights that stay float."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from carryall.graph_opt.passes.base import Refusal
from carryall.graph_opt.quantize.left_float import float_matrices, left_float


def _model() -> ir.Model:
    model = ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["" : 23]>
        g (float[3, 5, 8] x) => (float[3, 5, 4] y, float[3, 5, 6] z, float[3, 2, 5] c)
        {
            y = MatMul(x, experts)
            z = MatMul(x, plain)
            c = Conv(x, filters)
        }
        """
    )
    for name, shape in (("experts", (3, 8, 4)), ("plain", (8, 6)), ("filters", (2, 5, 4))):
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(np.ones(shape, np.float32), name=name)
        value.shape = ir.Shape(shape)
        model.graph.register_initializer(value)
    return model


def test_stacks_that_no_pass_looked_at_have_a_reason() -> None:
    model = _model()
    refusals = [Refusal("z", "weight plain has 6 outputs"), Refusal("z", "has no name")]
    left = left_float(float_matrices(model), model, refusals)
    stacked = next(reason for reason in left.reasons if "three axes" in reason)
    assert left.reasons == {"has 6 outputs": 1, stacked: 1}
    assert (left.weights, left.total) == (3, 3)
