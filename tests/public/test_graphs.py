"""Public reports of graphs that optimizers changed or broke: sessions and passes compute them as written.

Each row is a graph of our own for one report. The judge is ONNX's reference evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.runtime.api.session import InferenceSession

pytest.importorskip("onnxruntime")
Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Report:
    """A graph for a report.

    Args:
        source: the repository and the number.
        essence: what went wrong there.
        body: the nodes, in ONNX's text format.
        interface: the inputs and outputs.
        constants: the initializers.
        opset: the version of the operators.
        inputs: values of inputs that are not drawn at random.
        equal: the nodes of an equal graph, if the evaluator lacks a form of ``body``.
    """

    source: str
    essence: str
    body: str
    interface: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 18
    inputs: Mapping[str, Array] = field(default_factory=dict)
    equal: str = ""

    def model(self, body: str = "") -> onnx.ModelProto:
        nodes = body or self.body
        text = f'<ir_version: 9, opset_import: ["" : {self.opset}]> g {self.interface} {{ {nodes} }}'
        model: onnx.ModelProto = onnx.parser.parse_model(text)
        for name, value in self.constants.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return model


def floats(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape)).astype(np.float32)


ORT, SCRIPT, SIMPLIFIER, OPTIMIZER = (
    *("microsoft/onnxruntime#", "microsoft/onnxscript#", "onnxsim/onnxsim#", "onnx/optimizer#"),
)
ONE = {"one": np.float32(1), "unit": np.float32(1), "nil": np.float32(0)}
ERF = {"root": np.float32(1.4142135), "one": np.float32(1), "half": np.float32(0.5)}
LEVELS = {"q": np.array([[-5, 3, -128, 127], [1, -1, 0, 9]], np.int8)}
ZERO, PADS = np.array([0]), np.array([0, 0, 1, 1, 0, 0, 1, 1])
NORM = (
    "m = ReduceMean<axes = [-1]>(x) c = Sub(x, m) q = Pow(c, two) v = ReduceMean<axes = [-1]>(q)"
    " w = Add(v, e) r = Sqrt(w) n = Div(c, r)"
)
DROPPING = NORM.replace("[-1]>(x)", "[-1], keepdims = 0>(x)")
NORM_CONSTANTS = {"two": np.float32(2), "e": np.float32(1e-5)}
REPORTS = (
    Report(
        f"{ORT}32228", "an identity Transpose became transA of Gemm",
        "t = Transpose<perm = [0, 1]>(x) m = MatMul(t, w) y = Add(m, b)", "(float[4,4] x) => (float[4,4] y)",
        {"w": floats(4, 4), "b": floats(4)},
    ),
    Report(
        f"{ORT}32228", "an identity Transpose became transB of Gemm",
        "t = Transpose<perm = [0, 1]>(w) m = MatMul(x, t) y = Add(m, b)", "(float[4,4] x) => (float[4,4] y)",
        {"w": floats(4, 4), "b": floats(4)},
    ),
    Report(
        f"{ORT}32418", "an identity Transpose of a weight made Gemm invalid",
        "t = Transpose<perm = [0, 1]>(w) y = Gemm(x, t, b)", "(float[3,4] x, float[4,5] w) => (float[3,5] y)",
        {"b": floats(5)},
    ),
    Report(
        f"{ORT}12071", "a Transpose of the third operand of Gemm was fused without end",
        "c = Transpose(z) y = Gemm(x, w, c)", "(float[3,4] x, float[5,3] z) => (float[3,5] y)",
        {"w": floats(4, 5)},
    ),
    Report(
        f"{ORT}22177", "padding was moved into AveragePool, whose mean then left it out",
        "p = Pad(x, pads) y = AveragePool<kernel_shape = [2, 2]>(p)",
        "(float[1,2,4,4] x) => (float[1,2,5,5] y)", {"pads": PADS},
    ),
    Report(
        f"{ORT}22177", "padding with zeros was moved into MaxPool, which pads with the lowest number",
        "n = Abs(x) m = Neg(n) p = Pad(m, pads) y = MaxPool<kernel_shape = [2, 2]>(p)",
        "(float[1,2,4,4] x) => (float[1,2,5,5] y)", {"pads": PADS},
    ),
    Report(
        f"{SCRIPT}2838", "negative padding was moved into Conv",
        "p = Pad(x, pads) y = Conv<kernel_shape = [3, 3]>(p, w)", "(float[1,2,6,6] x) => (float[1,3,3,3] y)",
        {
            "pads": np.array([0, 0, -1, -1, 0, 0, 0, 0]), "w": floats(3, 2, 3, 3),
            "from": np.array([1, 1]), "to": np.array([6, 6]), "axes": np.array([2, 3]),
        },
        equal="p = Slice(x, from, to, axes) y = Conv<kernel_shape = [3, 3]>(p, w)",
    ),
    Report(
        f"{SIMPLIFIER}265", "two scalar constants became one",
        "a = Div(x, two) b = Mul(z, four) y = Add(a, b)", "(float[4] x, float[4] z) => (float[4] y)",
        {"two": np.float32(2), "four": np.float32(4)},
    ),
    Report(
        f"{ORT}32413", "an Identity vanished that a product with a folded quotient read",
        "i = Identity(x) o = Div(one, unit) w = Mul(i, o) y = Add(w, nil)",
        "(float[4] x) => (float[4] y)", ONE,
    ),
    Report(
        f"{ORT}32416", "a Cast to the same type vanished that a product with a folded quotient read",
        "i = Cast<to = 1>(x) o = Div(one, unit) w = Mul(i, o) y = Add(w, nil)",
        "(float[4] x) => (float[4] y)", ONE,
    ),
    Report(
        f"{OPTIMIZER}259", "removing repeated operators changed results: two Reshapes, the second with 0",
        "a = Reshape(x, s) y = Reshape(a, t)", "(float[2,3,4] x) => (float[4,6] y)",
        {"s": np.array([4, 6]), "t": np.array([0, -1])},
    ),
    Report(
        f"{OPTIMIZER}259", "removing repeated operators changed results: two zeros",
        "a = Reshape(x, s) y = Reshape(a, t)", "(float[2,3,4] x) => (float[6,2,2] y)",
        {"s": np.array([6, 2, 2]), "t": np.array([0, 0, -1])},
    ),
    Report(
        f"{OPTIMIZER}252", "removing Concat of one operand changed results",
        "a = Concat<axis = 0>(x) b = Concat<axis = 0>(a, x) y = Concat<axis = 1>(b)",
        "(float[2,3] x) => (float[4,3] y)",
    ),
    Report(
        f"{ORT}4110", "values inside of a fused pattern are outputs",
        "a = Add(x, b) d = Div(a, root) e = Erf(d) o = Add(e, one) m = Mul(a, o) y = Mul(m, half)",
        "(float[2,4] x) => (float[2,4] y, float[2,4] e, float[2,4] a)", {**ERF, "b": floats(4)},
    ),
    Report(
        f"{ORT}28413", "merging common subexpressions made a graph invalid",
        "a = Mul(x, c) b = Mul(x, c) y = Add(a, b) z = Identity(b)",
        "(float[4] x) => (float[4] y, float[4] z, float[4] a)", {"c": np.float32(3)},
    ),
    Report(
        f"{SCRIPT}2810", "the axes of a Squeeze in a branch were lost",
        "y = If(c)<then_branch = t () => (float[4] u) { axes = Constant<value_ints = [0]>()"
        " u = Squeeze(x, axes) }, else_branch = e () => (float[1,4] v) { v = Identity(x) }>",
        "(float[1,4] x) => (float[4] y)", {"c": np.array(True)},
    ),
    Report(
        f"{ORT}27845", "int8 without a zero point was clipped to uint8 behind Reshape",
        "d = DequantizeLinear(q, s) t = Reshape(d, shape) y = Add(t, t)", "(int8[2,4] q) => (float[4,2] y)",
        {"s": np.float32(0.1), "shape": np.array([4, 2])}, 21, LEVELS,
    ),
    Report(
        f"{ORT}28716", "int8 without a zero point became uint8 behind Transpose",
        "d = DequantizeLinear(q, s) t = Transpose(d) y = Add(t, t)", "(int8[2,4] q) => (float[4,2] y)",
        {"s": np.float32(0.1)}, 21, LEVELS,
    ),
    Report(
        f"{ORT}25001", "a quantizer to int32 was inserted, which does not exist",
        "d = DequantizeLinear(q, s, z) t = Reshape(d, shape) y = Relu(t)", "(int32[4] q) => (float[2,2] y)",
        {"s": np.float32(0.1), "z": np.int32(0), "shape": np.array([2, 2])}, 19,
        {"q": np.array([-5, 3, -128, 1270], np.int32)},
    ),
    Report(
        f"{ORT}25526", "output_dtype of int8 stayed where the zero point became uint8",
        "q = QuantizeLinear<output_dtype = 3>(x, s, z) d = DequantizeLinear(q, s, z) y = Add(d, d)",
        "(float[2,4] x) => (float[2,4] y)", {"s": np.float32(0.1), "z": np.int8(0)}, 21,
    ),
    Report(
        f"{ORT}25855", "a mean that drops its axis was fused to a layer norm",
        "m = ReduceMean<keepdims = 0>(x, axes) c = Sub(x, m) q = Mul(c, c) v = ReduceMean(q, axes)"
        " w = Add(v, e) r = Sqrt(w) n = Div(c, r) p = Mul(n, g) y = Add(p, b)",
        "(float[4,4] x) => (float[4,4] y)",
        {"axes": np.array([-1]), "e": np.float32(1e-5), "g": floats(4), "b": floats(4)},
    ),
    Report(
        f"{ORT}31980", "a norm over one element times a vector was fused, which needs equal sizes",
        f"{NORM} y = Mul(g, n)", "(float[3,1] x) => (float[3,2] y)", {**NORM_CONSTANTS, "g": floats(2)}, 17,
    ),
    Report(
        "onnx/onnx#8204", "a mean that drops its axis made a fused norm invalid",
f"{DROPPING} y = Mul(n, g)",
        "(float[4,4] x) => (float[4,4] y)", {**NORM_CONSTANTS, "g": floats(4)}, 17,
    ),
    Report(
        f"{ORT}3764", "a sum that is wider than the product became Gemm",
        "p = MatMul(x, w) q = Mul(two, z) y = Add(p, q)",
        "(float[3,3] x, float[3,1] w, float[1,4] z) => (float[3,4] y)", {"two": np.float32(2)},
    ),
    Report(
        f"{ORT}23138", "a fused Gelu refused a scalar",
        "d = Div(x, root) e = Erf(d) o = Add(e, one) m = Mul(x, o) y = Mul(m, half)",
        "(float x) => (float y)", ERF,
    ),
    Report(
        f"{ORT}7021", "a Transpose and a Cast were fused into MatMul although others read them",
        "t = Transpose<perm = [1, 0]>(x) c = Cast<to = 1>(t) y = MatMul(c, z) u = Add(c, c)",
        "(double[3,4] x, float[3,5] z) => (float[4,5] y, float[4,3] u)",
        inputs={"x": RNG.standard_normal((3, 4)), "z": floats(3, 5)},
    ),
    Report(
        f"{ORT}32417", "an identity Transpose of the input made Gemm invalid",
        "t = Transpose<perm = [0, 1]>(x) y = Gemm(t, w, b)", "(float[3,4] x) => (float[3,5] y)",
        {"w": floats(4, 5), "b": floats(5)},
    ),
    Report(
        "onnx/onnx#2446", "two Transposes were joined in the wrong order",
        "t = Transpose<perm = [1, 0, 2]>(x) y = Transpose<perm = [0, 2, 1]>(t)",
        "(float[2,3,4] x) => (float[3,4,2] y)",
    ),
    Report(
        f"{ORT}9753", "Clip behind Relu ended the process",
        "r = Relu(x) y = Clip(r, low, high)", "(float[2,3] x) => (float[2,3] y)",
        {"low": np.float32(-1), "high": np.float32(1)}, 11,
    ),
    Report(
        f"{ORT}24158", "Clip of doubles behind Relu could not be loaded",
        "r = Relu(x) y = Clip(r, low, high)", "(double[2,3] x) => (double[2,3] y)",
        {"low": np.float64(-1), "high": np.float64(1)}, 14, {"x": RNG.standard_normal((2, 3))},
    ),
    Report(
        f"{ORT}11836", "Clip of doubles without a lower bound could not be loaded behind Relu",
        "r = Relu(x) y = Clip(r, , high)", "(double[2,3] x) => (double[2,3] y)",
        {"high": np.float64(0.5)}, 14, {"x": RNG.standard_normal((2, 3))},
    ),
    Report(
        f"{ORT}12498", "a sum of the size of the result was fused into Conv with groups",
        "c = Conv<group = 2>(x, w, b) y = Add(c, z)", "(float[1,4,3,3] x) => (float[1,4,3,3] y)",
        {"w": floats(4, 2, 1, 1), "b": floats(4), "z": floats(1, 4, 3, 3)},
    ),
    Report(
        "NVIDIA/TensorRT#4606", "the upper bound of Clip behind a product was lost",
        "p = MatMul(x, w) a = Add(p, b) y = Clip(a, low, high)", "(float[2,3] x) => (float[2,4] y)",
        {"w": 9 * floats(3, 4), "b": floats(4), "low": np.float32(0), "high": np.float32(6)},
    ),
    Report(
        f"{OPTIMIZER}255", "a batch norm in Conv changed results",
        "c = Conv(x, w) y = BatchNormalization<epsilon = 0.1>(c, g, b, m, v)",
        "(float[1,2,4,4] x) => (float[1,3,3,3] y)",
        {
            "w": floats(3, 2, 2, 2), "g": floats(3), "b": floats(3), "m": floats(3),
            "v": np.array([0.01, 1, 9], np.float32),
        },
    ),
    Report(
        f"{OPTIMIZER}278", "a Pad that crops as much as it adds vanished",
        "y = Pad(x, pads)", "(float[2,3] x) => (float[2,3] y)", {
            "pads": np.array([1, 0, -1, 0]), "from": np.array([0, 0]), "to": np.array([1, 3]),
        },
        equal="t = Slice(x, from, to) z = Sub(t, t) y = Concat<axis = 0>(z, t)",
    ),
    Report(
        f"{OPTIMIZER}285", "zeros were left out of a sum although they widen it",
        "y = Add(x, z)", "(float[3] x) => (float[2,3] y)", {"z": np.zeros((2, 3), np.float32)},
    ),
    Report(
        f"{OPTIMIZER}285", "ones were left out of a product although they widen it",
        "a = Mul(x, o) y = Relu(a)", "(float[3] x) => (float[2,3] y)", {"o": np.ones((2, 1), np.float32)},
    ),
    Report(
        f"{OPTIMIZER}275", "an Expand by ones vanished that adds an axis",
        "e = Expand(x, s) y = Add(e, e)", "(float[2,3] x) => (float[1,2,3] y)", {"s": np.array([1, 1, 1])},
    ),
    Report(
        f"{OPTIMIZER}274", "Dropout vanished whose mask is read",
        "d, m = Dropout(x) f = Cast<to = 1>(m) y = Mul(d, f)",
        "(float[2,3] x) => (float[2,3] y, bool[2,3] m)",
    ),
    Report(
        f"{OPTIMIZER}283", "a Split into one part vanished that has a second reader",
        "p = Split<axis = 0, num_outputs = 1>(x) a = Neg(p) y = Add(a, x)",
        "(float[2,3] x) => (float[2,3] y, float[2,3] p)",
    ),
    Report(
        f"{OPTIMIZER}267", "a shape joined of parts became another one",
        "s = Concat<axis = 0>(a, b, c) y = Reshape(x, s)", "(float[2,3,4] x) => (float[2,2,6] y)",
        {"a": np.array([0]), "b": np.array([-1]), "c": np.array([6])},
    ),
    Report(
        f"{OPTIMIZER}269", "padding was moved into AveragePool that pads itself",
        "p = Pad(x, pads, one) y = AveragePool<kernel_shape = [2, 2], pads = [1, 0, 0, 0]>(p)",
        "(float[1,2,4,4] x) => (float[1,2,6,5] y)", {"pads": PADS, "one": np.float32(1)},
    ),
    Report(
        "onnx/tensorflow-onnx#934", "axes of a Slice behind a Transpose changed, which another Slice reads",
        "t = Transpose<perm = [0, 2, 1]>(x) a = Slice(t, from, to, axes) b = Slice(x, from, to, axes)"
        " y = ReduceSum(a) z = ReduceSum(b)",
        "(float[2,3,4] x) => (float[1,1,1] y, float[1,1,1] z)",
        {"from": np.array([1]), "to": np.array([3]), "axes": np.array([1])},
    ),
    Report(
        "onnx/tensorflow-onnx#226", "a shape was read from a value whose Transpose had moved",
        "t = Transpose<perm = [0, 2, 3, 1]>(x) m = ReduceMean(t, axes) s = Shape(m) r = Reshape(m, flat)"
        " y = Reshape(r, s)",
        "(float[2,3,4,4] x) => (float[2,1,1,3] y)", {"axes": np.array([1, 2]), "flat": np.array([2, 3])},
    ),
    Report(
        f"{ORT}29788", "folded constants shared memory that was freed",
        "a = Reshape(k, s) b = Squeeze(a, axes) c = Flatten(b) y = Add(x, c)",
        "(float[2,3] x) => (float[2,3] y)", {"k": floats(6), "s": np.array([1, 2, 3]), "axes": np.array([0])},
    ),
    Report(
        f"{ORT}7524", "sums of products of bytes were cut to 16 bits",
        "y = MatMulInteger(x, w, a, b)", "(uint8[2,4] x) => (int32[2,2] y)",
        {
            "w": np.array([[127, -128], [126, -127], [127, 5], [-3, 127]], np.int8),
            "a": np.uint8(3), "b": np.int8(-20),
        },
        inputs={"x": np.array([[255, 254, 255, 1], [250, 255, 3, 255]], np.uint8)},
    ),
    Report(
        f"{ORT}29727", "the largest int8 of a quantized Softmax became the smallest",
        "d = DequantizeLinear(x, f, z) s = Softmax(d) q = QuantizeLinear(s, t, low)"
        " y = DequantizeLinear(q, t, low)",
        "(int8[1,4] x) => (float[1,4] y)",
        {"f": np.float32(0.2), "z": np.int8(0), "t": np.float32(1 / 256), "low": np.int8(-128)}, 19,
        {"x": np.array([[127, -128, -100, -128]], np.int8)},
    ),
    Report(
        f"{ORT}18589", "the scale of 8 bits was used for a Softmax of 16 bits",
        "s = Softmax(x) q = QuantizeLinear(s, t, z) y = DequantizeLinear(q, t, z)",
        "(float[2,4] x) => (float[2,4] y)", {"t": np.float32(1 / 65536), "z": np.uint16(0)}, 21,
    ),
    Report(
        "onnx/onnx#2556", "the zero point of values above zero",
        "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)",
        "(float[2,3] x) => (float[2,3] y, uint8 z)",
        opset=19, inputs={"x": np.array([[0.5, 1, 2], [3, 4, 7.5]], np.float32)},
    ),
    Report(
        "onnx/onnx#4367", "the size of a Slice with steps was wrong",
        "a = Slice(x, from, to, axes, steps) y = Neg(a)", "(float[2,7] x) => (float[2,3] y)",
        {"from": np.array([0]), "to": np.array([6]), "axes": np.array([1]), "steps": np.array([2])},
    ),
    Report(
        "onnx/onnx#7735", "a backward Slice of an empty axis ended the process",
        "a = Slice(x, from, to, axes, steps) y = Neg(a)", "(float[0,3] x) => (float[n,3] y)",
        {"from": np.array([-1]), "to": np.array([-9]), "axes": np.array([0]), "steps": np.array([-1])},
    ),
    Report(
        "nod-ai/AMD-SHARK-ModelDev#824", "a backward Slice was not supported",
        "y = Slice(x, from, to, axes, steps)", "(float[2,5] x) => (float[2,3] y)",
        {"from": np.array([-1]), "to": np.array([-6]), "axes": np.array([1]), "steps": np.array([-2])},
    ),
    Report(
        "onnx/onnx#2025", "a Conv whose steps are wider than its kernel was refused",
        "y = Conv<kernel_shape = [1, 1], strides = [3, 3]>(x, w)", "(float[1,2,6,5] x) => (float[1,3,2,2] y)",
        {"w": floats(3, 2, 1, 1)},
    ),
    Report(
        f"{ORT}2776", "an activation with an alpha was fused into Gemm that has one",
        "g = Gemm<alpha = 0.5>(x, w, b) y = LeakyRelu<alpha = 0.2>(g)", "(float[3,4] x) => (float[3,5] y)",
        {"w": floats(4, 5), "b": floats(5)},
    ),
    Report(
        f"{ORT}32130", "comparisons of constants were not folded before opset 16",
        "s = Shape(x) c = GreaterOrEqual(s, k) f = Cast<to = 1>(c) y = Mul(x, f)",
        "(float[3,2] x) => (float[3,2] y)", {"k": np.array([2, 3])}, 13,
    ),
    Report(
        f"{ORT}15318", "a Resize of a constant was not folded",
        'r = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">'
        "(k, , scales) y = Add(x, r)",
        "(float[1,1,4,4] x) => (float[1,1,4,4] y)",
        {"k": floats(1, 1, 2, 2), "scales": np.array([1, 1, 2, 2], np.float32)},
    ),
    Report(
        "microsoft/onnxruntime-genai#2081", "a norm over two axes was fused with the sum before it",
        "a = Add(x, z) y = LayerNormalization<axis = 1>(a, g)",
        "(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y)", {"g": floats(3, 4)},
    ),
    Report(
        f"{ORT}3768", "the epsilon of a norm behind a sum was lost",
        "a = Add(x, z) y = LayerNormalization<epsilon = 0.5>(a, g, b)",
        "(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y)", {"g": floats(4), "b": floats(4)},
    ),
)  # fmt: skip
each = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.source)


def feeds(report: Report, model: onnx.ModelProto) -> dict[str, Array]:
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    return {name: report.inputs[name] if report.inputs else floats(*shape) for name, shape in shapes.items()}


def right_results(report: Report, inputs: dict[str, Array]) -> list[Array]:
    """Return what ONNX's evaluator computes."""
    return [np.asarray(result) for result in ReferenceEvaluator(report.model(report.equal)).run(None, inputs)]


def check(expected: list[Array], results: list[Array]) -> None:
    for right, result in zip(expected, results, strict=True):
        assert (result.shape, result.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@each
def test_a_session_computes_the_graph_as_written(report: Report) -> None:
    model = report.model()
    inputs = feeds(report, model)
    check(right_results(report, inputs), InferenceSession(model, providers=["cpu"]).run(None, inputs))


@pytest.mark.long
@each
def test_passes_keep_the_interface_and_the_results(report: Report) -> None:
    model = report.model()
    inputs = feeds(report, model)
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    optimized, _ = run(ir.from_proto(copy), model_passes())
    check_model(optimized, "optimized")
    after = ir.to_proto(optimized)
    names = [[value.name for value in (*graph.input, *graph.output)] for graph in (model.graph, after.graph)]
    assert names[0] == names[1]
    check(right_results(report, inputs), InferenceSession(after, providers=["cpu"]).run(None, inputs))
