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


@each
def test_a_session_computes_the_graph_as_written(report: Report) -> None:
    model = report.model()
    inputs = feeds(report, model)
    check(right_results(report, inputs), InferenceSession(model, providers=["cpu"]).run(None, inputs))


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
