from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import evaluate

from carryall.errors import GraphError
from carryall.graph_opt.passes.normalize.raise_opset import RaiseOpsetPass


def model(body: str, opset: int, signature: str = "(float[2, 6] x) => (float[2, 3] y)") -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : {opset}]> g {signature} {{ {body} }}')


@pytest.mark.parametrize("opset", [13, 17])
def test_reductions_and_splits_of_old_opsets(opset: int) -> None:
    body = "a, b = Split <axis = 1> (x) m = ReduceMean <axes = [1], keepdims = 1> (a) y = Sub(b, m)"
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    raised = model(body, opset)
    RaiseOpsetPass()(raised)
    assert raised.opset_imports[""] == 23
    np.testing.assert_array_equal(evaluate(raised, {"x": x})[0], evaluate(model(body, opset), {"x": x})[0])


@pytest.mark.parametrize("opset", [23, 24])
def test_newer_models_stay_as_they_are(opset: int) -> None:
    same = model("y = Slice(x, s, e, a)", opset)
    assert not RaiseOpsetPass()(same).modified
    assert same.opset_imports[""] == opset


def test_an_opset_that_is_too_old_is_named() -> None:
    with pytest.raises(GraphError, match=r"of opset 11; export it again with opset 13 or later"):
        RaiseOpsetPass()(model("y = Relu(x)", 11))


def test_an_operator_that_changed_its_form_is_named() -> None:
    with pytest.raises(GraphError, match=r"Resize .*opset below 18"):
        RaiseOpsetPass()(model("y = Resize(x, , s)", 15))


def test_what_a_newer_opset_only_adds_to_is_raised() -> None:
    body = "p = Pad(x, pads) y = ScatterND(p, rows, updates)"
    old = model(
        body, 14, "(float[2, 6] x, int64[4] pads, int64[1, 1] rows, float[1, 7] updates) => (float[3, 7] y)"
    )
    raised = ir.from_proto(ir.to_proto(old))
    RaiseOpsetPass()(raised)
    feed = {"x": np.ones((2, 6), np.float32), "pads": np.array([1, 0, 0, 1]), "rows": np.array([[1]])}
    feed["updates"] = np.full((1, 7), 5, np.float32)
    np.testing.assert_array_equal(evaluate(raised, feed)[0], evaluate(old, feed)[0])


def test_roi_align_keeps_the_default_that_it_had() -> None:
    signature = "(float[1, 1, 4, 4] x, float[1, 4] r, int64[1] b) => (float[1, 1, 2, 2] y)"
    for opset, mode in ((15, "output_half_pixel"), (16, None)):
        raised = model("y = RoiAlign <output_height = 2, output_width = 2> (x, r, b)", opset, signature)
        RaiseOpsetPass()(raised)
        stated = raised.graph[0].attributes.get("coordinate_transformation_mode")
        assert (stated.as_string() if stated else None) == mode
