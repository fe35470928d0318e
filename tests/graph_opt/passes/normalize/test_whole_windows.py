"""Pools that round up keep their results, and shape inference agrees with the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from carryall.graph_opt.passes.normalize.whole_windows import WholeWindowsPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.runtime.api.session import InferenceSession

ort = pytest.importorskip("onnxruntime")


def pool(kind: str, size: tuple[int, int], **attributes: list[int]) -> onnx.ModelProto:
    given = ", ".join(f"{name} = {list(value)}" for name, value in attributes.items())
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[1, 2, {size[0]}, {size[1]}] x) => '
        f"(float[a, b, c, d] y) {{ y = {kind} <ceil_mode = 1, {given}> (x) }}"
    )
    return model


def computed(model: onnx.ModelProto) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # it warns of inferred sizes that its kernels do not compute
    session = ort.InferenceSession(model.SerializeToString(), options)
    size = session.get_inputs()[0].shape
    x = -1 - np.arange(np.prod(size), dtype=np.float32).reshape(size) % 23
    return np.asarray(session.run(None, {"x": x})[0])


def inferred(model: onnx.ModelProto) -> tuple[int, ...]:
    (output,) = onnx.shape_inference.infer_shapes(model).graph.output
    return tuple(dim.dim_value for dim in output.type.tensor_type.shape.dim)


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    kernel=PAIRS,
    strides=PAIRS,
    pads=st.tuples(*[st.integers(0, 2)] * 4),
)
def test_results_stay_and_inference_agrees(
    kind: str, size: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, ...]
) -> None:
    pads = tuple(min(pad, kernel[place % 2] - 1) for place, pad in enumerate(pads))  # as onnxruntime demands
    before = pool(kind, size, kernel_shape=[*kernel], strides=[*strides], pads=[*pads])
    model = ir.from_proto(before)
    refusals = apply(WholeWindowsPass(), model)
    after = ir.to_proto(model)
    expected = computed(before)
    np.testing.assert_array_equal(computed(after), expected)
    assert refusals or inferred(after) == expected.shape


def test_a_window_of_real_values_stays() -> None:
    model = ir.from_proto(pool("MaxPool", (4, 4), kernel_shape=[3, 3], strides=[2, 2]))
    assert apply(WholeWindowsPass(), model) == []
    assert model.graph.node(0).attributes["ceil_mode"].as_int() == 1


def test_unknown_sizes_stay() -> None:
    body = "y = MaxPool <ceil_mode = 1, kernel_shape = [3, 3], pads = [0, 0, 0, 1], strides = [2, 3]> (x)"
    model = graph(f"g (float[1, 2, h, w] x) => (float[1, 2, a, b] y) {{ {body} }}")
    assert apply(WholeWindowsPass(), model) == []
    assert "ceil_mode" in model.graph.node(0).attributes


def test_a_fused_activation_behind_it_opens_in_a_session() -> None:
    """onnxruntime expands Celu; the size that it inferred for the parts was not the recorded one."""
    nodes = (
        "p = Pad (x, pads)"
        " m = MaxPool <ceil_mode = 1, kernel_shape = [3, 3], pads = [0, 0, 0, 1], strides = [2, 3]> (p)"
        " c = Celu <alpha = 0.7> (m) t = Tanh (c) y = Mul (c, t)"
    )
    model = graph(
        f"g (float[b, 3, 5, 4] x) => (float[b, 3, 3, 2] y) {{ {nodes} }}",
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    )
    before = ir.to_proto(model)
    after, _ = run(model, model_passes())
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    (found,) = InferenceSession(ir.to_proto(after), providers=["cpu"]).run(None, {"x": x})
    expected = np.asarray(next(iter(ReferenceEvaluator(before).run(None, {"x": x}))))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
