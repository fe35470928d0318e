from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import evaluate

from carryall.graph_opt.graph.lazy import Array
from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.passes.fuse.fuse_activation import FuseActivationPass
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


OLD_FORMS: dict[str, tuple[Any, ...]] = {
    "BatchNormalization": ("y = BatchNormalization (x, v, v, v, w)", 7, 8, 9, 13),
    "Clip": ("y = Clip <min = -0.5, max = 1.0> (x)", 7, 10),
    "Clip without a bound": ("y = Clip <min = -0.5> (x)", 7, 10),
    "Dropout": ("y = Dropout <ratio = 0.3> (x)", 7, 10),
    "Dropout of 12": ("y = Dropout (x)", 12, 13),
    "LogSoftmax": ("y = LogSoftmax (x)", 7, 11, 12),
    "Softmax of the last axis": ("y = Softmax <axis = 3> (x)", 7, 12),
    "Softmax of joined axes": ("y = Softmax <axis = 2> (x)", 7, 12),
    "Softmax by default": ("y = Softmax (x)", 7, 12, 13),
    "Softmax of an unknown rank": ("s = Shape(z) r = Reshape(x, s) y = Softmax <axis = 1> (r)", 7, 12),
    "Hardmax": ("y = Hardmax (x)", 7, 11),
    "Pad": ("y = Pad <pads = [0, 0, 1, 0, 0, 0, 1, 2], value = 3.0> (x)", 7, 10),
    "Pad with zeros": ("y = Pad <pads = [0, 0, 1, 0, 0, 0, 1, 2]> (x)", 7, 10),
    "ReduceMean": ("y = ReduceMean <axes = [-1, 1]> (x)", 11, 17),
    "ReduceSum": ("y = ReduceSum <axes = [2], keepdims = 0> (x)", 7, 12),
    "ReduceMax of all": ("y = ReduceMax (x)", 7, 17),
    "Resize": ('y = Resize <mode = "nearest"> (x, f)', 10),
    "Resize linear": ('y = Resize <mode = "linear"> (x, f)', 10),
    "Resize of 11": ('y = Resize <mode = "linear"> (x, n, f)', 11, 12, 13, 17),
    "Scatter": ("y = Scatter <axis = 1> (x, i, x)", 9, 10),
    "Slice": ("y = Slice <starts = [1, -3], ends = [3, 9], axes = [1, 3]> (x)", 7, 9),
    "Slice of the first axes": ("y = Slice <starts = [0, 1], ends = [1, 3]> (x)", 7, 9),
    "Split": ("y, b = Split <axis = 1, split = [1, 3]> (x)", 7, 12),
    "Squeeze": ("y = Squeeze <axes = [0]> (x)", 7, 12),
    "Squeeze of all": ("y = Squeeze (x)", 7, 12),
    "Unsqueeze": ("y = Unsqueeze <axes = [0, 3]> (x)", 7, 12),
    "TopK": ("y, b = TopK <axis = 2, k = 2> (x)", 7, 9),
    "Upsample": ('y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]> (x)', 7, 8),
    "Upsample linear": ('y = Upsample <mode = "linear"> (x, f)', 9),
    "GridSample": ("y = GridSample <align_corners = 1> (x, g)", 16, 19),
    "DFT": ("e = Unsqueeze(x, last) y = DFT (e)", 17, 19),
}


def compute(proto: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    wanted = {value.name for value in session.get_inputs()}
    found: list[Array] = session.run(None, {name: feed[name] for name in wanted})
    return found


@pytest.mark.parametrize(
    ("name", "opset"), [(name, opset) for name, (_, *opsets) in OLD_FORMS.items() for opset in opsets]
)
def test_converted_old_forms_give_equal_results(name: str, opset: int) -> None:
    """The oracle is onnxruntime, which runs opset 7 and later without conversion."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 4, 3, 5)).astype(np.float32)
    signature = """(float[1, 4, 3, 5] x, float[4] v, float[4] w, float[4] f, float[0] n, int64[1, 4, 3, 5] i,
        float[1, 2, 2, 2] g, int64[1] last, float[a, b, c, d] z) => (y)"""
    before = model(OLD_FORMS[name][0], opset, signature)
    raised = ir.from_proto(ir.to_proto(before))
    pass_ = RaiseOpsetPass()
    pass_(raised)
    assert (pass_.refusals, pass_.source, raised.opset_imports[""]) == ([], opset, 23)
    check_model(raised, "raised")
    feed: dict[str, Array] = {
        "x": x, "v": np.array([0.5, 1, 2, 3], np.float32), "w": np.ones(4, np.float32),
        "f": np.array([1, 1, 2, 1.5], np.float32), "n": np.zeros(0, np.float32),
        "i": rng.permuted(np.tile(np.arange(4)[:, None, None], (1, 1, 3, 5)), axis=1),
        "g": rng.uniform(-1, 1, (1, 2, 2, 2)).astype(np.float32), "last": np.array([4]), "z": x,
    }  # fmt: skip
    expected, found = (compute(ir.to_proto(one), feed)[0] for one in (before, raised))
    np.testing.assert_array_equal(found, expected)


def test_a_group_norm_of_old_scales_groups() -> None:
    """The expected result follows the definition of opset 18; onnxruntime has no kernel for it."""
    body, rng = "y = GroupNormalization <num_groups = 2> (x, s, b)", np.random.default_rng(0)
    raised = model(body, 18, "(float[2, 4, 3] x, float[2] s, float[2] b) => (float[2, 4, 3] y)")
    RaiseOpsetPass()(raised)
    x, s, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 3), 2, 2))
    groups = x.reshape(2, 2, 6).astype(np.float64)
    centred = groups - groups.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = (normal * s[:, None] + b[:, None]).reshape(x.shape)
    np.testing.assert_allclose(evaluate(raised, {"x": x, "s": s, "b": b})[0], expected, rtol=1e-5, atol=1e-6)


def test_forms_in_branches_are_converted() -> None:
    inside = """y = If(c) <then_branch = t () => (float[2, 1, 6] a) { a = Unsqueeze <axes = [1]> (x) },
        else_branch = e () => (float[2, 1, 6] b) { u = Unsqueeze <axes = [1]> (x) b = Neg(u) }>"""
    old = model(inside, 11, "(float[2, 6] x, bool c) => (float[2, 1, 6] y)")
    raised = ir.from_proto(ir.to_proto(old))
    RaiseOpsetPass()(raised)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    for chosen in (np.array(True), np.array(False)):
        expected, found = (compute(ir.to_proto(one), {"x": x, "c": chosen})[0] for one in (old, raised))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.3, 1 / 3, 0.5, 0.6, 0.75, 0.9, 1.1, 1.5, 2.0, 2.7])
@pytest.mark.parametrize("size", [5, 8, 13])
def test_the_nearest_pixel_of_opset_10_is_onnxruntime_s(scale: float, size: int) -> None:
    body = 'y = Resize <mode = "nearest"> (x, s)'
    x = np.arange(2 * size * size, dtype=np.float32).reshape(1, 2, size, size)
    shapes = f"float[1, 2, {size}, {size}] x", "(float[a, b, c, d] y)"
    for factors in ([1, 1, scale, 1], [1, 1, 1, scale], [1, 1, scale, scale]):
        numbers = ", ".join(f"{factor:.9g}" for factor in factors)
        stored = f"({shapes[0]}) => {shapes[1]} <float[4] s = {{{numbers}}}>"
        for signature in (stored, f"({shapes[0]}, float[4] s) => {shapes[1]}"):
            old = ir.from_onnx_text(f'<ir_version: 5, opset_import: ["": 10]> g {signature} {{ {body} }}')
            raised = ir.from_proto(ir.to_proto(old))
            RaiseOpsetPass()(raised)
            assert raised.opset_imports[""] > 10
            feed = {"x": x, "s": np.array(factors, np.float32)}
            expected, found = (compute(ir.to_proto(one), feed)[0] for one in (old, raised))
            np.testing.assert_array_equal(found, expected)


def test_an_axis_that_shrinks_beside_one_that_grows_keeps_opset_10() -> None:
    text = """<ir_version: 5, opset_import: ["": 10]> g (float[1, 1, 4, 4] x) => (float[a, b, c, d] y)
        <float[4] s = {1, 1, 0.5, 2}> { y = Resize <mode = "nearest"> (x, s) }"""
    old = ir.from_onnx_text(text)
    RaiseOpsetPass()(old)
    assert old.opset_imports[""] == 10


HALF_PIXELS = '<coordinate_transformation_mode = "tf_half_pixel_for_nn">'
HINDERED = {
    "too old": ("y = Relu(x)", 6, "the model keeps opset 6: conversion needs opset 7 or newer"),
    "a dropped attribute": ("y = BatchNormalization <spatial = 0> (x, v, v, v, v)", 8, "removed spatial"),
    "a dropped value": (f"y = Resize {HALF_PIXELS} (x, v, v)", 12, "tf_half_pixel_for_nn"),
    "training": ("y, m = BatchNormalization (x, v, v, v, v) z = Neg(m)", 9, "opset 14 changed the outputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINDERED)
def test_unconvertible_graphs_are_unchanged(name: str) -> None:
    """No node is converted, and passes that write newer forms do not change the graph."""
    body, opset, reason = HINDERED[name]
    if name != "too old":
        body += " d = Dropout <ratio = 0.5> (y)"
    old = model(body, opset, "(float[1, 2, 3, 3] x, float[2] v) => (y)")
    before = ir.to_proto(old)
    one = RaiseOpsetPass()
    assert not one(old).modified
    assert ir.to_proto(old) == before
    assert [reason in refusal.reason for refusal in one.refusals] == [True]
    assert not FuseActivationPass()(old).modified


def test_initializers_of_the_first_ir_versions_are_constants() -> None:
    old = model(
        "y = Mul(x, w)", 9, "(float[2, 6] x, float[6] w) => (float[2, 6] y) <float[6] w = {1,2,3,4,5,6}>"
    )
    old.ir_version = 3
    RaiseOpsetPass()(old)
    assert [value.name for value in old.graph.inputs] == ["x"]
    assert old.ir_version >= 4


def test_compatible_operators_are_converted() -> None:
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
