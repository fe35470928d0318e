"""Static int8: ranges from text, the standard Q/DQ form and the kernel's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.graph.graph_facts import count_operators
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.products.static_int8 import StaticProductsPass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.calibration.calibrators import min_max
from carryall.graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from carryall.graph_opt.quantize.search.ranges import input_histograms

RNG = np.random.default_rng(0)
V, W = (RNG.standard_normal((32, n)).astype(np.float32) for n in (8, 6))
FORM = BlockFormat(bits=8, block_size=16)
WINDOWS = [RNG.integers(0, 256, 50) for _ in range(4)]
TWO = """g (float[B, 32] x) => (float[B, 8] y, float[B, 6] z)
    { h = Relu(x) m = MatMul(h, v) y = Relu(m) p = MatMul(h, w) n = Add(p, b) z = Relu(n) }"""
BIAS = np.ones(6, np.float32)


def quantized(family: str, folder: Path, **overrides: Any) -> Path:
    """Save ``static.onnx``, a portable graph in Q/DQ form, beside ``float.onnx``."""
    ir.save(export_model(write_tiny(family, folder / "checkpoint", **overrides)), folder / "float.onnx")
    histograms = input_histograms(folder / "float.onnx", WINDOWS, context_length=64)
    ranges = {name: min_max(histogram) for name, histogram in histograms.items()}
    model = ir.load(folder / "float.onnx")
    report = pipeline.run(model, [StaticQuantizationPass(FORM, ranges)], debug=True)[1]
    assert report.refusals == []
    ir.save(model, folder / "static.onnx")
    return folder / "static.onnx"


def test_products_are_near_the_float_ones_and_share_their_input() -> None:
    model, x = graph(TWO, v=V, w=W, b=BIAS), RNG.standard_normal((5, 32)).astype(np.float32)
    exact = evaluate(graph(TWO, v=V, w=W, b=BIAS), {"x": x})
    assert apply(StaticQuantizationPass(FORM, {"h": float(x.max())}), model) == []
    counts = count_operators(model)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"], counts["MatMul"]) == (1, 3, 2)
    stored = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert stored["v.values"] == stored["constants/int8_zero_point"] == ir.DataType.INT8
    for result, expected in zip(evaluate(model, {"x": x}), exact, strict=True):
        error = np.abs(result - expected).max()
        assert 0 < error < 0.02 * np.abs(expected).max()


def test_values_beyond_the_range_are_clipped() -> None:
    text = "g (float[B, 2] x) => (float[B, 2] y) { h = Relu(x) m = MatMul(h, w) y = Relu(m) }"
    model = graph(text, w=np.eye(2, dtype=np.float32))
    apply(StaticQuantizationPass(FORM, {"h": 1.27}), model)
    np.testing.assert_allclose(evaluate(model, {"x": np.array([[0.5, 9.0]], np.float32)})[0], [[0.5, 1.27]])


def test_excluded_and_unmeasured_products_become_weight_only() -> None:
    model = graph(TWO, v=V, w=W, b=BIAS)
    apply(StaticQuantizationPass(FORM, {"h": 1.0}, exclude=["w"]), model)
    assert {"v.values", "w.values"} <= set(model.graph.initializers)
    assert len([*nodes_of(model.graph, "QuantizeLinear")]) == 1
    model = graph(TWO, v=V, w=W, b=BIAS)
    assert apply(StaticQuantizationPass(FORM, {}), model) == 2 * ["the range of h is unknown"]
    assert "QuantizeLinear" not in count_operators(model)


def test_products_of_one_input_become_one_kernel_call() -> None:
    model = graph(TWO.replace("n = Add(p, b) z = Relu(n)", "z = Relu(p)"), v=V, w=W)
    apply(StaticQuantizationPass(FORM, {"h": 3.0}), model)
    assert apply(StaticProductsPass(), model) == []
    expected = ["Relu", "QuantizeLinear", "MatMulIntegerToFloat", "Split", "Relu", "Relu"]
    assert [node.op_type for node in model.graph] == expected
    assert model.graph.initializers["constants/uint8_middle"].dtype == ir.DataType.UINT8


def test_products_the_kernel_cannot_compute_are_explained() -> None:
    text = """g (float[B, 32] x, float[32, 4] r) => (float[B, 4] y)
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, r) }"""
    model = graph(text, s=np.float32(0.1), z=np.int8(0))
    assert apply(StaticProductsPass(), model) == ["the other operand is not an int8 weight"]
    assert count_operators(model)["QuantizeLinear"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 16}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {}),
        ("gpt2", {}),
    ],
)
def test_lowering_keeps_the_results_and_rows_are_independent(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    portable = quantized(family, tmp_path, **overrides)
    model = ir.load(portable)
    pipeline.run(model, slot_passes(SlotOptions(context_length=64)), debug=True)
    assert count_operators(model)["com.microsoft::MatMulIntegerToFloat"] == 8  # qkv, o, gate and up, down
    assert "MatMul" not in {node.op_type for node in model.graph if "lm_head" not in str(node.name)}
    ir.save(model, tmp_path / "lowered.onnx")
    first = PortableRunner(portable)
    alone, together = (SlotGraphRunner(tmp_path / "lowered.onnx", slots=2, max_length=64) for _ in range(2))
    for count in (11, 1, 1):
        tokens, others = RNG.integers(0, 256, count), RNG.integers(0, 256, count)
        left, right = first.forward({0: tokens})[0], alone.forward({0: tokens})[0]
        # A value halfway between two levels may be rounded in either direction.
        np.testing.assert_allclose(left, right, atol=2e-2 * float(np.abs(left).max()))
        assert np.abs(left - right).mean() < 2e-3 * np.abs(left).max()
        both = together.forward({0: tokens, 1: others})[0]
        np.testing.assert_allclose(both, right, atol=1e-5 * float(np.abs(right).max()))


def test_ranges_do_not_depend_on_how_many_layers_are_measured_at_a_time(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    ir.save(model, tmp_path / "float.onnx")
    seen: list[tuple[int, int, str]] = []
    one, many = (
        input_histograms(
            tmp_path / "float.onnx",
            WINDOWS,
            context_length=64,
            max_bytes=size,
            progress=lambda *told: seen.append(told),
        )
        for size in (1 << 28, 1)
    )
    assert len(one) == 8  # four inputs in each of two layers, without the head's
    assert {name: found.largest for name, found in many.items()} == pytest.approx(
        {name: found.largest for name, found in one.items()}
    )
    assert [told[:2] for told in seen[:4]] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert seen[-1][:2] == (32, 32)


def test_nan_activations_are_named(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    gain = model.graph.initializers["model.layers.1.input_layernorm.weight"]
    gain.const_value = ir.tensor(np.full(32, np.nan, np.float32), name=gain.name)
    ir.save(model, tmp_path / "broken.onnx")
    with pytest.raises(GraphError, match=r"model.layers.1.input_layernorm.* holds NaN or infinity"):
        input_histograms(tmp_path / "broken.onnx", WINDOWS, context_length=64)
