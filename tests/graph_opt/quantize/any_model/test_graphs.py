"""The expected graphs of static and dynamic quantization, and the layers that stay float."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import assert_same, canonical, graph

from carryall.errors import GraphError
from carryall.graph_opt.quantize.any_model.dynamic import DynamicGraphPass
from carryall.graph_opt.quantize.any_model.grid import Grid
from carryall.graph_opt.quantize.any_model.layers import find_layers
from carryall.graph_opt.quantize.any_model.logarithms import before_logarithms
from carryall.graph_opt.quantize.any_model.options import IntegerOptions, exempt
from carryall.graph_opt.quantize.any_model.quantize import prepare, quantize_static
from carryall.graph_opt.quantize.any_model.samples import Samples
from carryall.graph_opt.quantize.any_model.static import StaticGraphPass, quantized_values
from carryall.graph_opt.quantize.any_model.tables import TablePass

W = np.array([[[[1.27]]], [[[-2.54]]]], np.float32)  # [2, 1, 1, 1]
B = np.array([0.5, 1.0], np.float32)
U8 = ir.DataType.UINT8


def unit(*names: str) -> dict[str, Grid]:
    return {name: Grid(0.5, 0, U8) for name in names}


def test_a_convolution_is_quantized_from_its_input_to_behind_its_relu() -> None:
    model = graph("g (float[1,1,4,4] x) => (float y) { c = Conv(x, w, b) r = Relu(c) y = Neg(r) }", w=W, b=B)
    StaticGraphPass({"x": Grid(0.25, 3, U8), "r": Grid(0.5, 0, U8)})(model)
    expected = graph(
        """g (float[1,1,4,4] x) => (float y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
            v = DequantizeLinear<axis=0>(w, ws, wz) c = Conv(d, v, b) r = Relu(c)
            p = QuantizeLinear(r, t, o) e = DequantizeLinear(p, t, o) y = Neg(e) }""",
        w=np.array([127, -127], np.int8).reshape(2, 1, 1, 1),
        ws=np.array([0.01, 0.02], np.float32),
        wz=np.zeros(2, np.int8),
        b=B,
        s=np.float32(0.25),
        z=np.uint8(3),
        t=np.float32(0.5),
        o=np.uint8(0),
    )
    assert_same(model, expected)


def test_a_product_s_bias_becomes_int32() -> None:
    w = np.array([[1.27, -2.54]], np.float32)
    model = graph("g (float[N,1] x) => (float y) { m = MatMul(x, w) y = Add(m, b) }", w=w, b=B)
    StaticGraphPass({"x": Grid(0.5, 0, U8)})(model)
    expected = graph(
        """g (float[N,1] x) => (float y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
            v = DequantizeLinear<axis=1>(w, ws, wz) m = MatMul(d, v)
            c = DequantizeLinear<axis=0>(b, bs, bz) y = Add(m, c) }""",
        w=np.array([[127, -127]], np.int8),
        ws=np.array([0.01, 0.02], np.float32),
        wz=np.zeros(2, np.int8),
        b=np.array([100, 100], np.int32),
        bs=np.array([0.005, 0.01], np.float32),
        bz=np.zeros(2, np.int32),
        s=np.float32(0.5),
        z=np.uint8(0),
    )
    assert_same(model, expected)


def test_dynamic_gemm_and_conv() -> None:
    text = "g (float[N,1] x) => (float y) { y = Gemm<transB=1>(x, w, b) }"
    model = graph(text, w=np.array([[1.27], [-2.54]], np.float32), b=B)
    DynamicGraphPass()(model)
    expected = graph(
        """g (float[N,1] x) => (float y) {
            q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast<to=1>(i)
            t = Mul(s, ws) m = Mul(f, t) y = Add(m, b) }""",
        w=np.array([[127, -127]], np.int8),
        ws=np.array([0.01, 0.02], np.float32),
        b=B,
    )
    assert_same(model, expected)

    model = graph("g (float[1,1,4,4] x) => (float y) { y = Conv<strides=[2,2]>(x, w) }", w=W)
    DynamicGraphPass(operators=["Conv"])(model)
    expected = graph(
        """g (float[1,1,4,4] x) => (float y) {
            q, s, z = DynamicQuantizeLinear(x) i = ConvInteger<strides=[2,2]>(q, w, z, o) f = Cast<to=1>(i)
            t = Mul(s, ws) y = Mul(f, t) }""",
        w=np.array([255, 1], np.uint8).reshape(2, 1, 1, 1),
        ws=np.array([0.01, 0.02], np.float32).reshape(2, 1, 1),
        o=np.uint8(128),
    )
    assert_same(model, expected)


def test_data_movement_keeps_the_scale_and_stays_quantized() -> None:
    text = """g (float[1,2,8,8] x) => (float y) { c = Conv(x, w, b) r = Relu(c)
        m = MaxPool<kernel_shape=[2,2]>(r) t = Transpose<perm=[0,1,3,2]>(m) y = Conv(t, v) }"""
    model = graph(text, w=np.ones((2, 2, 1, 1), np.float32), b=B, v=np.ones((3, 2, 1, 1), np.float32))
    assert quantized_values(model.graph) == ["x", "r", "y"]
    StaticGraphPass(unit("x", "r", "y"))(model)
    for node in model.graph:
        if node.op_type in ("MaxPool", "Transpose", "Conv"):
            assert node.inputs[0] is not None
            assert node.inputs[0].producer().op_type == "DequantizeLinear"  # type: ignore[union-attr]
    assert sum(name.endswith(".scale") for name in model.graph.initializers) == 3


def test_sums_of_quantized_operands_are_quantized() -> None:
    text = """g (float[1,2,8,8] x, float[1,2,8,8] f) => (float y, float u) { a = Conv(x, w) b = Conv(x, v)
        s = Add(a, b) y = Conv(s, w2) t = Add(a, f) u = Conv(t, v2) }"""
    ones = dict.fromkeys(("w", "v", "w2", "v2"), np.ones((2, 2, 1, 1), np.float32))
    model = graph(text, **ones)
    StaticGraphPass(unit("x", "a", "b", "s", "t", "y", "u"))(model)
    sums = [node for node in model.graph if node.op_type == "Add"]
    rounded = [
        [value.producer() is not None and value.producer().op_type for value in node.inputs if value]  # type: ignore[union-attr]
        for node in sums
    ]
    assert rounded == [["DequantizeLinear", "DequantizeLinear"], ["DequantizeLinear", False]]
    # f was not quantized for the sum; only the layers' inputs and outputs were.
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 7


def test_an_activation_that_reads_a_value_twice_reads_it_behind_one_identity() -> None:
    text = """g (float[1,2,8,8] x) => (float y) { c = Conv(x, w, b) d = Div(c, two) e = Erf(d)
        a = Add(e, two) y = Mul(c, a) }"""
    model = graph(text, w=np.ones((2, 2, 1, 1), np.float32), b=B, two=np.float32(2))
    StaticGraphPass(unit("x", "c"))(model)
    by_type = {node.op_type: node for node in model.graph}
    shared = by_type["Identity"].outputs[0]
    assert by_type["Div"].inputs[0] is shared
    assert by_type["Mul"].inputs[0] is shared
    assert sum(node.op_type == "Identity" for node in model.graph) == 1


def test_a_weight_of_several_layers_is_stored_once() -> None:
    text = "g (float[N,2] x) => (float y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, w) }"
    for quantizer in (StaticGraphPass(unit("x", "r")), DynamicGraphPass()):
        model = graph(text, w=np.eye(2, dtype=np.float32))
        quantizer(model)
        assert quantizer.fired == 2
        kinds = [
            value.dtype for value in model.graph.initializers.values() if value.shape == ir.Shape([2, 2])
        ]
        assert kinds == [ir.DataType.INT8]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Gemm<transA=1>(x, w)", "the Gemm has transA"),
        ("y = Gemm<alpha=2.0>(x, w)", "the Gemm has alpha or beta other than 1"),
        ("y = MatMul(x, w3)", "it is not a matrix"),
        ("a = MatMul(x, w) y = Add(a, w)", "it has other consumers and would be stored twice"),
        (
            "a = MatMul(x, w) y = Gemm<transB=1>(a, w)",
            "it has other consumers and would be stored twice",
        ),
        ("y = MatMul(x, wide)", "a sum of more than 65536 products can overflow 32 bits"),
        ("y = Gemm(x, w, wrong)", "the bias is not a constant with one value per channel"),
    ],
)
def test_other_nodes_are_refused_with_a_reason(body: str, reason: str) -> None:
    arrays: dict[str, Any] = {
        "w": np.eye(2, dtype=np.float32),
        "w3": np.ones((2, 2, 2), np.float32),
        "wide": np.ones((65537, 2), np.float32),
        "wrong": np.ones((2, 2), np.float32),
    }
    layers, refused = find_layers([graph(f"g (float[2,2] x) => (float y) {{ {body} }}", **arrays).graph])
    assert list(refused.values()) == [reason]
    assert layers == []


def test_both_operands_may_be_activations() -> None:
    model = graph("g (float[2,2] x) => (float y) { y = MatMul(x, x) }")
    assert find_layers([model.graph]) == ([], {})


def test_excluded_weights_and_unknown_ranges() -> None:
    text = "g (float[N,2] x) => (float y) { y = MatMul(x, w) }"
    model = graph(text, w=np.eye(2, dtype=np.float32))
    before = canonical(model)
    StaticGraphPass({}, exclude=["w"])(model)
    DynamicGraphPass(exclude=["w"])(model)
    assert canonical(model) == before
    with pytest.raises(Exception, match="the range of x is unknown; calibrate it"):
        StaticGraphPass({})(model)


@pytest.mark.parametrize("quantizer", [StaticGraphPass(unit("x")), DynamicGraphPass()])
def test_a_nan_weight_is_named(quantizer: StaticGraphPass | DynamicGraphPass) -> None:
    text = "g (float[N,2] x) => (float y) { y = MatMul(x, w) }"
    with pytest.raises(Exception, match="weight w cannot be quantized: it holds NaN or infinity") as caught:
        quantizer(graph(text, w=np.array([[1, np.nan], [0, 1]], np.float32)))
    assert isinstance(caught.value.__cause__ or caught.value, GraphError)


def test_tables_have_one_scale_per_row() -> None:
    table = np.outer([1, 0, 4], np.linspace(-127, 127, 8000)).astype(np.float32)
    model = graph("g (int64[N] x) => (float y) { y = Gather(w, x) }", w=table)
    pass_ = TablePass()
    pass_(model)
    assert pass_.fired == 1
    assert [node.op_type for node in model.graph] == ["Gather", "Gather", "Cast", "Mul"]
    stored = model.graph.initializers["w.scales"].const_value
    assert stored is not None
    np.testing.assert_allclose(
        stored.numpy().reshape(-1), [1, 4, 4]
    )  # a row of zeros gets the scale of another row


@pytest.mark.parametrize("text", ["y = Gather<axis=1>(w, x)", "a = Gather(w, x) y = MatMul(a, w)"])
def test_tables_with_other_readers_stay_float(text: str) -> None:
    model = graph(f"g (int64[N] x) => (float y) {{ {text} }}", w=np.ones((128, 128), np.float32))
    pass_ = TablePass()
    pass_(model)
    assert pass_.fired == 0


def test_norms_are_folded_before_weights_are_rounded() -> None:
    """Opset 13 is the oldest that INT8 is written for."""
    arrays = {
        "w": W,
        "g": np.array([2, 6], np.float32),
        "s": np.array([1, -1], np.float32),
        "m": np.array([0.5, 0], np.float32),
        "v": np.array([4, 9], np.float32),
    }
    text = """g (float[1,1,4,4] x) => (float[1,2,4,4] y) {
        c = Conv(x, w) y = BatchNormalization<epsilon=0.0>(c, g, s, m, v) }"""
    model = graph(text, **arrays)
    model.opset_imports[""] = 13
    (node,) = prepare(model).graph
    assert node.op_type == "Conv"
    assert node.inputs[1] is not None
    assert node.inputs[1].const_value is not None
    np.testing.assert_allclose(node.inputs[1].const_value.numpy(), W * np.array([1, 2]).reshape(2, 1, 1, 1))


def test_layers_before_a_logarithm_stay_float() -> None:
    """A spectrogram's filters stay float; layers before an activation or after the logarithm do not."""
    text = """g (float[1,1,4,4] x) => (float y) {
        o = Conv(x, outer) r = Relu(o) a = Conv(r, first) b = Transpose(a) p = Mul(b, b) c = Conv(p, second)
        l = Log(c) y = Conv(l, behind) }"""
    weights = {
        name: np.full((8, 1, 12, 12), number + 1, np.float32)
        for number, name in enumerate(("outer", "first", "second", "behind"))
    }
    layers, _ = find_layers([graph(text, **weights).graph])
    assert set(before_logarithms(layers)) == {"first", "second"}
    left = exempt(layers, {}, IntegerOptions(exclude=("outer",)), convolutions=True)
    assert left["first"].startswith("a logarithm reads its result")


def test_a_spectrogram_survives_int8() -> None:
    """Rounded filters of a Fourier transform would drown what is quiet: 13 dB instead of 30."""
    rng, size, bins = np.random.default_rng(0), 128, 64
    time, frequency = np.arange(size), np.arange(bins)[:, None]
    angles = 2 * np.pi * time * frequency / size
    weights = {
        "real": np.cos(angles).astype(np.float32)[:, None],
        "imaginary": np.sin(angles).astype(np.float32)[:, None],
        "mix": (rng.standard_normal((bins, 32)) / 8).astype(np.float32),
        "least": np.float32(1e-9),
    }
    text = """g (float[1,1,2048] x) => (float y) {
        a = Conv<strides=[64]>(x, real) b = Conv<strides=[64]>(x, imaginary)
        c = Mul(a, a) d = Mul(b, b) e = Add(c, d) f = Add(e, least) l = Log(f)
        t = Transpose<perm=[0, 2, 1]>(l) y = MatMul(t, mix) }"""
    quiet = np.geomspace(1, 1e-4, 2048)
    feeds = [{"x": (quiet * rng.standard_normal((1, 1, 2048))).astype(np.float32)} for _ in range(4)]
    _, report = quantize_static(graph(text, **weights), Samples(feeds, "noise"))
    assert set(report.left_float) == {"real", "imaginary"}
    assert report.outputs["y"].snr > 30
