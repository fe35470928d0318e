"""Results of the written graphs, compared with integers in NumPy, onnx.reference and onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
from graph_asserts import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_oracle import conv_sums, dynamic_levels, levels_of

from carryall.graph_opt.graph.integer_sums import exact_sums
from carryall.graph_opt.quantize.any_model.dynamic import DynamicGraphPass
from carryall.graph_opt.quantize.any_model.grid import grid
from carryall.graph_opt.quantize.any_model.static import StaticGraphPass, quantized_values

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A convolution: sizes per spatial axis, channels per group."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    pads: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    inputs: int
    outputs: int
    bias: bool
    seed: int

    @property
    def window(self) -> dict[str, Any]:
        names = ("pads", "strides", "dilations", "groups")
        return {name: getattr(self, name) for name in names}

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed)
        weight = rng.standard_normal((self.outputs * self.groups, self.inputs, *self.kernel)) * 0.3
        weight[0] *= rng.choice([0.0, 1.0, 40.0])  # a channel of zeros, or one much larger than the others
        found = {"w": weight.astype(np.float32)}
        if self.bias:
            found["b"] = rng.standard_normal(len(weight)).astype(np.float32)
        return found

    def x(self) -> Array:
        rng = np.random.default_rng(self.seed + 1)
        return (rng.standard_normal((2, self.inputs * self.groups, *self.sizes)) + 0.4).astype(np.float32)

    def model(self) -> ir.Model:
        arrays, shape = self.arrays(), ",".join(map(str, self.x().shape))
        attributes = (
            f"pads={list(self.pads)}, strides={list(self.strides)}, dilations={list(self.dilations)}, "
            f"group={self.groups}"
        )
        return parse(f"float[{shape}] x", f"y = Conv<{attributes}>(x, {', '.join(arrays)})", **arrays)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 2))

    def each(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    depthwise = draw(st.booleans())
    return Case(
        sizes=each(5, 9),
        kernel=each(1, 3),
        pads=each(0, 2, 2 * rank),
        strides=each(1, 2),
        dilations=each(1, 2),
        groups=draw(st.integers(1, 4)),
        inputs=1 if depthwise else draw(st.integers(1, 3)),
        outputs=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def parse(inputs: str, body: str, **arrays: Array) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => (float y) {{ {body} }}'
    tensors = [ir.tensor(array, name=name) for name, array in arrays.items()]
    return ir.from_onnx_text(text, initializers=tensors)


def run_ort(model: ir.Model, feed: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source, entries = exact_sums(ir.to_proto(model).SerializeToString())
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [np.asarray(one) for one in session.run(None, feed)]


def stored(model: ir.Model, name: str) -> Array:
    content = model.graph.initializers[name].const_value
    assert content is not None
    return content.numpy()


def watch(model: ir.Model, op_type: str, dtype: ir.DataType) -> None:
    """Add the result of the graph's only node of this kind as an output."""
    node = next(node for node in model.graph if node.op_type == op_type)
    node.outputs[0].type = ir.TensorType(dtype)
    model.graph.outputs.append(node.outputs[0])


@settings(max_examples=30, deadline=None)
@given(cases())
def test_dynamic_convolutions_sum_exactly(case: Case) -> None:
    model, x = case.model(), case.x()
    DynamicGraphPass(operators=["Conv"])(model)
    watch(model, "ConvInteger", ir.DataType.INT32)
    levels, scale, zero = dynamic_levels(x)
    values, scales = stored(model, "w.values"), stored(model, "w.scales").reshape(-1)
    assert values.dtype == np.uint8
    sums = conv_sums(levels, values, x_zero=zero, w_zero=128, **case.window)
    for run in (evaluate, run_ort):
        y, integers = run(model, {"x": x})
        np.testing.assert_array_equal(integers, sums)
        shape = (1, -1, *[1] * len(case.sizes))
        exact = sums * (scale * scales).reshape(shape) + case.arrays().get("b", np.zeros(1)).reshape(shape)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * float(np.abs(exact).max()))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_static_convolutions_are_integer_sums_between_two_grids(case: Case) -> None:
    model, x = case.model(), case.x()
    exact = evaluate(case.model(), {"x": x})[0]
    grids = {
        "x": grid(float(x.min()), float(x.max()), ir.DataType.UINT8),
        "y": grid(float(exact.min()), float(exact.max()), ir.DataType.UINT8),
    }
    assert quantized_values(model.graph) == ["x", "y"]
    StaticGraphPass(grids)(model)
    values, scales = stored(model, "w.values"), stored(model, "w.scales")
    assert values.dtype == np.int8
    levels = levels_of(x, np.float32(grids["x"].scale), grids["x"].zero_point, 0, 255)
    sums = conv_sums(levels, values, x_zero=grids["x"].zero_point, **case.window)
    shape = (1, -1, *[1] * len(case.sizes))
    real = sums * (np.float64(np.float32(grids["x"].scale)) * scales).reshape(shape)
    real = real + case.arrays().get("b", np.zeros(1)).reshape(shape)
    scale = grids["y"].scale
    wanted = levels_of(real, scale, grids["y"].zero_point, 0, 255)
    for run in (evaluate, run_ort):
        found = np.rint(run(model, {"x": x})[0] / scale) + grids["y"].zero_point
        off = np.abs(found - wanted)
        assert off.max() <= 1
        ties = (
            np.abs(np.abs(real / scale - np.rint(real / scale)) - 0.5) < 1e-2
        )  # ties may round in either direction
        assert not off[~ties].any()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 9),
    form=st.sampled_from(
        ["MatMul(x, w)", "MatMul+b", "Gemm(x, w)", "Gemm(x, w, b)", "Gemm<transB=1>(x, w, b)"]
    ),
    seed=st.integers(0, 99),
)
def test_products_sum_exactly(rows: int, inputs: int, outputs: int, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, b = rng.standard_normal((inputs, outputs)).astype(np.float32), rng.standard_normal(outputs)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    arrays = {"w": w.T.copy() if "transB" in form else w}
    if "b" in form:
        arrays["b"] = b.astype(np.float32)
    body = "m = MatMul(x, w) y = Add(m, b)" if form == "MatMul+b" else f"y = {form}"
    addend = arrays.get("b", np.zeros(1, np.float32))

    model = parse(f"float[{rows},{inputs}] x", body, **arrays)
    DynamicGraphPass()(model)
    watch(model, "MatMulInteger", ir.DataType.INT32)
    levels, scale, zero = dynamic_levels(x)
    values, scales = stored(model, "w.values"), stored(model, "w.scales")
    sums = (levels.astype(np.int64) - zero) @ values.astype(np.int64)
    for run in (evaluate, run_ort):
        y, integers = run(model, {"x": x})
        np.testing.assert_array_equal(integers, sums)
        np.testing.assert_allclose(y, sums * (scale * scales) + addend, rtol=1e-5, atol=1e-4)

    model = parse(f"float[{rows},{inputs}] x", body, **arrays)
    grids = {"x": grid(float(x.min()), float(x.max()), ir.DataType.UINT8)}
    StaticGraphPass(grids)(model)
    levels64 = levels_of(x, np.float32(grids["x"].scale), grids["x"].zero_point, 0, 255)
    values, scales = stored(model, "w.values"), stored(model, "w.scales")
    values = values.T if "transB" in form else values
    sums = (levels64 - grids["x"].zero_point) @ values.astype(np.int64)
    steps = np.float32(grids["x"].scale) * scales
    bias = 0 if "b" not in arrays else np.rint(arrays["b"] / steps.astype(np.float64)) * steps  # an int32
    exact = sums * steps.astype(np.float64) + bias
    for run in (evaluate, run_ort):
        np.testing.assert_allclose(run(model, {"x": x})[0], exact, rtol=1e-5, atol=1e-4)
