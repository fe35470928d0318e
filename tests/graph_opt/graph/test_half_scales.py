"""Scales are float32 in memory and float16 in a file, with the same values."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, canonical, evaluate, graph

from carryall.errors import GraphError
from carryall.graph_opt.graph.edit import hold_in_memory
from carryall.graph_opt.graph.graph_facts import describe_tensor, initializers, weights_by_type
from carryall.graph_opt.graph.half_scales import Widened, narrowed_scales, widen_scales
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 8)).astype(np.float32)
X = RNG.standard_normal((3, 64)).astype(np.float32)
TWO = """g (float[B, 64] x) => (float[B, 8] y, float[B, 8] z) {
    y = MatMul(x, w) s = Add(x, x) z = MatMul(s, v) }"""


def quantized(**forms: object) -> ir.Model:
    model = graph(TWO, w=W, v=W * 0.01)
    apply(WeightOnlyQuantizationPass(BlockFormat(**forms)), model)  # type: ignore[arg-type]
    return model


def names(model: ir.Model) -> list[tuple[str, str]]:
    found = model.graph.initializers.values()
    return [(str(value.name), value.dtype.name) for value in found if value.dtype is not None]


@pytest.mark.parametrize(
    "forms", [{"block_size": 16}, {"bits": 8, "symmetric": False, "block_size": 32}], ids=str
)
def test_a_file_has_float16_and_memory_has_the_same_in_float32(
    tmp_path: Path, forms: dict[str, object]
) -> None:
    model = quantized(**forms)
    before, order = evaluate(model, {"x": X}), names(model)
    text = canonical(model)
    with narrowed_scales(model):
        save_model(model, tmp_path / "model.onnx")
        assert dict(names(model))["w.scales.float16"] == "FLOAT16"
        assert [node.op_type for node in model.graph][:2] == ["Cast", "DequantizeLinear"]
    assert canonical(model) == text
    assert names(model) == order
    stored = ir.load(tmp_path / "model.onnx")
    assert [name for name, dtype in names(stored) if dtype == "FLOAT16"] == [
        "w.scales.float16",
        "v.scales.float16",
    ]
    assert [node.op_type for node in stored.graph].count("Cast") == 2
    hold_in_memory(stored.graph)
    for left, right in zip(evaluate(stored, {"x": X}), before, strict=True):
        np.testing.assert_array_equal(left, right)
    loaded = load_model(tmp_path / "model.onnx")
    assert names(loaded) == order
    assert [node.op_type for node in loaded.graph] == [node.op_type for node in model.graph]
    scales = loaded.graph.initializers["w.scales"].const_value
    assert isinstance(scales, Widened)  # a copy that is written has float16 again
    hold_in_memory(loaded.graph)
    for left, right in zip(evaluate(loaded, {"x": X}), before, strict=True):
        np.testing.assert_array_equal(left, right)


def test_sizes_are_told_as_the_file_has_them(tmp_path: Path) -> None:
    model = quantized(block_size=16)
    facts = weights_by_type(model)
    assert "FLOAT" not in facts
    assert facts["FLOAT16"] == {"tensors": 2, "bytes": 2 * (64 // 16) * 8 * 2}
    (scales,) = (tensor for tensor in initializers(model) if tensor.name == "w.scales")
    told = describe_tensor(scales)
    assert (told["name"], told["dtype"], told["bytes"]) == ("w.scales", "FLOAT16", (64 // 16) * 8 * 2)
    with narrowed_scales(model):
        assert weights_by_type(model) == facts


def test_a_failed_write_leaves_the_graph_as_it_was() -> None:
    model = quantized(block_size=16)
    text = canonical(model)
    with pytest.raises(ZeroDivisionError), narrowed_scales(model):
        raise ZeroDivisionError
    assert canonical(model) == text


def test_bfloat16_and_minima_are_widened_and_narrowed(tmp_path: Path) -> None:
    text = """g (float[B, 64] x) => (float[B, 8] y) {
        scale = Cast <to = 1> (s) minimum = Cast <to = 1> (m)
        whole = DequantizeLinear <axis = 0, block_size = 32> (w, scale) apart = Reshape (whole, inner)
        added = Add (apart, minimum) weight = Reshape (added, outer) y = MatMul (x, weight) }"""
    parts = {"s": RNG.random((2, 8)).astype(ml_dtypes.bfloat16), "m": RNG.random((2, 1, 8), np.float32)}
    parts["m"] = parts["m"].astype(np.float16)
    parts |= {"inner": np.array([2, 32, 8]), "outer": np.array([64, 8])}
    model = graph(text, w=RNG.integers(-128, 128, (64, 8)).astype(np.int8), **parts)
    before = evaluate(model, {"x": X})
    widen_scales(model)
    assert "Cast" not in {node.op_type for node in model.graph}
    with narrowed_scales(model):
        save_model(model, tmp_path / "model.onnx")
    assert {dtype for name, dtype in names(ir.load(tmp_path / "model.onnx")) if "float16" in name} == {
        "BFLOAT16",
        "FLOAT16",
    }
    hold_in_memory(model.graph)
    np.testing.assert_array_equal(evaluate(model, {"x": X})[0], before[0])


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] y) { wide = Cast <to = 1> (half) y = Add(x, wide) }",
        "g (float16[4] x) => (float[4] y) { y = Cast <to = 1> (x) }",
        """g (int8[4, 4] x) => (float[4, 4] y, float[4] wide) {
            wide = Cast <to = 1> (half) y = DequantizeLinear <axis = 1> (x, wide) }""",
    ],
)
def test_other_casts_stay(text: str) -> None:
    model = graph(text, half=np.ones(4, np.float16)) if "half" in text else graph(text)
    before = canonical(model)
    widen_scales(model)
    assert canonical(model) == before


def test_a_scale_beyond_float16_is_an_error() -> None:
    model = graph("g (float[B, 64] x) => (float[B, 8] y) { y = MatMul(x, w) }", w=W * 1e7)
    apply(WeightOnlyQuantizationPass(BlockFormat(block_size=16)), model)
    scales = model.graph.initializers["w.scales"].const_value
    assert scales is not None
    with pytest.raises(GraphError, match=r"weight w has a scale of .*; float16 ends at 65504"):
        scales.numpy()


def test_a_stored_scale_with_several_uses_stays_as_it_is() -> None:
    text = """g (float[B, 64] x) => (float[B, 8] y, float[B, 8] z) {
        a = Cast <to = 1> (s) b = Cast <to = 1> (s)
        left = DequantizeLinear <axis = 0, block_size = 32> (w, a) y = MatMul (x, left)
        right = DequantizeLinear <axis = 0, block_size = 32> (v, b) z = MatMul (x, right) }"""
    weights = {name: RNG.integers(-128, 128, (64, 8)).astype(np.int8) for name in "wv"}
    model = graph(text, **weights, s=RNG.random((2, 8)).astype(np.float16))
    before, as_given = evaluate(model, {"x": X}), canonical(model)
    widen_scales(model)
    assert canonical(model) == as_given
    for left, right in zip(evaluate(model, {"x": X}), before, strict=True):
        np.testing.assert_array_equal(left, right)
