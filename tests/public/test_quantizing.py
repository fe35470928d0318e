"""Public reports of int8 quantization of graphs: small scales, three axes, activations that vanished."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import UsageError
from carryall.graph_opt.quantize.any_model.options import IntegerOptions
from carryall.graph_opt.quantize.any_model.quantize import quantize_dynamic, quantize_static
from carryall.graph_opt.quantize.any_model.samples import checked_samples
from carryall.runtime.api.session import InferenceSession

pytest.importorskip("onnxruntime")
Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape)).astype(np.float32)


CONV = "g (float[4,8,9,9] x) => (float[4,8,7,7] y) { %s }"
STACK = "g (float[5,3,32] x) => (float[5,3,16] y) { h = MatMul(x, w) y = Relu(h) }"
DENSE = "g (float[64,4096] x) => (float[64,1] y) { h = Gemm<transB = 1>(x, w, b) y = Add(h, c) }"
TINY = {"w": 1e-9 * normal(8, 8, 3, 3), "b": np.array([5, -4.5, 3, 1, -2, 7, 0.5, 4], np.float32)}
WIDE = {
    "w": normal(8, 8, 3, 3) * np.geomspace(1e-3, 10, 8, dtype=np.float32).reshape(8, 1, 1, 1),
    "b": normal(8),
}
ZEROS = {"w": normal(8, 8, 3, 3) * (np.arange(8) % 2).astype(np.float32).reshape(8, 1, 1, 1), "b": normal(8)}
CASES = [
    # A bias in units of two small scales left the range of int32: 51 % of the accuracy.
    ("microsoft/onnxruntime#22020", CONV % "y = Conv(x, w, b)", TINY),
    ("microsoft/onnxruntime#25278", CONV % "h = Conv(x, w, b) y = Relu(h)", TINY),
    # One scale for each channel of very different size.
    ("microsoft/onnxruntime#11415", CONV % "h = Conv(x, w, b) y = HardSwish(h)", WIDE),
    # Channels of zeros, whose scale would be zero.
    ("microsoft/onnxruntime#21000", CONV % "y = Conv(x, w, b)", ZEROS),
    # A Relu whose place symmetric ranges, which do not clip at zero, took.
    (
        "microsoft/onnxruntime#11660",
        CONV % "h = Conv(x, w, b) y = Relu(h)",
        {"w": normal(8, 8, 3, 3), "b": normal(8)},
    ),
    ("microsoft/onnxruntime#9425", CONV % "h = Conv(x, w, b) r = Relu(h) y = Add(r, r)", WIDE),
    # A bias of one element.
    ("microsoft/onnxruntime#24815", DENSE, {"w": normal(1, 4096), "b": normal(1), "c": normal(1)}),
]


@pytest.mark.long
@pytest.mark.parametrize("method", ["uint8", "int8", "dynamic"])
@pytest.mark.parametrize(("source", "text", "weights"), CASES, ids=[case[0] for case in CASES])
def test_int8_is_near_the_floats(source: str, text: str, weights: dict[str, Array], method: str) -> None:
    before = graph(text, **weights)
    shape = (before.graph.inputs[0].shape or ir.Shape(())).numpy()
    feeds = [{"x": normal(*shape)} for _ in range(4)]
    expected = run(before, feeds[0])
    samples = checked_samples(before.graph, feeds)
    # Limits that would leave a layer in floats are off: the integers themselves are judged.
    options = IntegerOptions(max_error=None, float_share=0.0, skip_slow=False, convolutions=True)
    if method == "dynamic":
        after, _ = quantize_dynamic(graph(text, **weights), samples, options)
    else:
        after, _ = quantize_static(graph(text, **weights), samples, replace(options, activations=method))
    kinds = {node.op_type for node in after.graph}
    assert kinds & {"QuantizeLinear", "DequantizeLinear", "MatMulInteger", "ConvInteger"}, kinds
    noise = np.abs(run(after, feeds[0]) - expected).max()
    assert noise <= 0.03 * np.abs(expected).max(), source


def test_a_weight_of_three_axes_is_left_with_the_reason() -> None:
    """microsoft/onnxruntime#25489: scales of its channels were a graph that no session runs."""
    feeds = [{"x": normal(5, 3, 32)} for _ in range(4)]
    model = graph(STACK, w=normal(5, 32, 16))
    for quantize in (quantize_static, quantize_dynamic):
        with pytest.raises(UsageError, match="nothing in the model can be quantized: it is not a matrix"):
            quantize(model, checked_samples(model.graph, feeds))


def run(model: ir.Model, feed: dict[str, Array]) -> Array:
    """Return the first result of a session."""
    return np.asarray(InferenceSession(ir.to_proto(model), providers=["cpu"]).run(None, feed)[0])
