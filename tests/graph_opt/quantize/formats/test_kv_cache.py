"""The 8-bit KV cache: scales, the standard form and the kernel's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import evaluate, graph
from tiny_models import write_tiny

from carryall.errors import GraphError, UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass, has_quantized_kv, kv_scales

CONTEXT = 64
RNG = np.random.default_rng(0)
WINDOWS = [RNG.integers(0, 256, 32) for _ in range(8)]
ATTENTION = """g (float[1, S, 16] q, float[1, S, 8] k, float[1, S, 8] v,
        float[1, 1, T, 8] pk, float[1, 1, T, 8] pv)
        => (float[1, S, 16] y, float[1, 1, U, 8] key, float[1, 1, U, 8] value) {
    y, key, value = Attention <q_num_heads = 2, kv_num_heads = 1, is_causal = 1> (q, k, v, , pk, pv) }"""
# Ropes inside and outside of the kernel, norms of keys, windows, soft caps, no rope.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 16}),
    ("llama", {}),
    ("mistral", {"head_dim": 16}),
    ("qwen3", {}),
    ("gemma3_text", {"head_dim": 16, "attn_logit_softcapping": 2.0}),
    ("gpt2", {}),
]


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


@pytest.fixture(scope="module", params=CASES, ids=["-".join([name, *map(str, more)]) for name, more in CASES])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a portable graph with a quantized cache."""
    family, overrides = request.param
    folder = tmp_path_factory.mktemp("kv")
    model = export_model(write_tiny(family, folder / "checkpoint", **overrides))
    scales = kv_scales(save(model, folder / "float.onnx"), WINDOWS, context_length=CONTEXT)
    model = ir.load(folder / "float.onnx")
    report = pipeline.run(model, [QuantizeKVPass(scales)])[1]
    assert report.passes[0].fired == len(scales) / 2
    return save(model, folder / "quantized.onnx")


def lowered(path: Path, kv_cache: str = "auto") -> Path:
    options = SlotOptions(context_length=CONTEXT, kv_cache=kv_cache)
    model = pipeline.run(ir.load(path), slot_passes(options))[0]
    return save(model, path.with_name(f"{kv_cache}.onnx"))


@pytest.mark.long
def test_the_kernel_equals_the_standard_form(quantized: Path) -> None:
    """In any order of tokens, both forms quantize a key once with the same rounding."""
    model = lowered(quantized)
    caches = [value for value in ir.load(model).graph.inputs if "past_key_values" in str(value.name)]
    assert {value.dtype for value in caches} == {ir.DataType.INT8}
    first, second = PortableRunner(quantized), SlotGraphRunner(model, slots=3, max_length=CONTEXT)
    for run in ({0: 9, 1: 3, 2: 17}, {0: 1, 1: 1, 2: 1}, {1: 6}, {0: 1, 2: 1}, {2: 4}):
        rows = {row: RNG.integers(0, 256, count) for row, count in run.items()}
        left, right = first.forward(rows), second.forward(rows)
        for row in rows:
            # A value halfway between two levels may be rounded in either direction.
            np.testing.assert_allclose(left[row], right[row], atol=2e-2 * np.abs(left[row]).max())
            assert np.abs(left[row] - right[row]).mean() < 2e-3 * np.abs(left[row]).max()


def test_whole_equals_pieces_equals_batch(quantized: Path) -> None:
    """The kernel reads the quantized keys of the same run, so pieces use the same keys as the whole.

    The tokens are fixed: products of other lengths differ in the last bits, and a key of other tokens may
    then be rounded to the neighbouring level.
    """
    draw = np.random.default_rng(0)
    model, tokens = lowered(quantized), draw.integers(0, 256, 21)
    whole = SlotGraphRunner(model, slots=1, max_length=CONTEXT).forward({0: tokens})[0]
    pieces, batch = (SlotGraphRunner(model, slots=3, max_length=CONTEXT) for _ in range(2))
    parts = [pieces.forward({0: tokens[a:b]})[0] for a, b in ((0, 8), (8, 9), (9, 10), (10, 21))]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5 * np.abs(whole).max())
    rows = {0: draw.integers(0, 256, 5), 1: tokens[:-1], 2: draw.integers(0, 256, 12)}
    batch.forward(rows)
    last = batch.forward({0: tokens[:1], 1: tokens[-1:], 2: tokens[:1]})[1]
    np.testing.assert_allclose(last, whole[-1:], atol=1e-5 * np.abs(whole).max())


def test_one_scale_for_a_whole_tensor(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    scales = kv_scales(save(model, tmp_path / "float.onnx"), WINDOWS, context_length=CONTEXT)
    whole = {name: scale.max() for name, scale in scales.items()}
    model = pipeline.run(ir.load(tmp_path / "float.onnx"), [QuantizeKVPass(whole)])[0]
    path = save(model, tmp_path / "quantized.onnx")
    low = lowered(path)
    kinds = {
        node.attributes["k_quant_type"].as_string()
        for node in ir.traversal.RecursiveGraphIterator(ir.load(low).graph)
        if "k_quant_type" in node.attributes
    }
    assert kinds == {"PER_TENSOR"}
    first, second = PortableRunner(path), SlotGraphRunner(low, slots=1, max_length=CONTEXT)
    for count in (9, 1, 5):
        tokens = RNG.integers(0, 256, count)
        left, right = first.forward({0: tokens})[0], second.forward({0: tokens})[0]
        np.testing.assert_allclose(left, right, atol=2e-2 * np.abs(left).max())
        assert np.abs(left - right).mean() < 2e-3 * np.abs(left).max()


def test_a_float_cache_can_be_requested(quantized: Path) -> None:
    model = lowered(quantized, "float32")
    tokens = RNG.integers(0, 256, 12)
    exact = PortableRunner(quantized.with_name("float.onnx")).forward({0: tokens})[0]
    result = SlotGraphRunner(model, slots=1, max_length=CONTEXT).forward({0: tokens})[0]
    np.testing.assert_allclose(result, exact, atol=1e-5 * np.abs(exact).max())


def test_int8_needs_scales(quantized: Path) -> None:
    with pytest.raises(UsageError, match=r"no scales for an int8 KV cache; .*carryall quantize .* --kv int8"):
        lowered(quantized.with_name("float.onnx"), "int8")


def test_modes_are_checked() -> None:
    with pytest.raises(UsageError, match="must be one of auto, int8, fp8, bfloat16, float32, found 'fp4'"):
        SlotOptions(context_length=CONTEXT, kv_cache="fp4")


def test_keys_and_values_are_rounded_to_their_channels_levels() -> None:
    model = graph(ATTENTION)
    assert not has_quantized_kv(model.graph)
    scales = {name: np.linspace(0.1, 0.8, 8, dtype=np.float32) for name in ("pk", "pv")}
    pipeline.run(model, [QuantizeKVPass(scales)])
    assert has_quantized_kv(model.graph)
    k, v = (RNG.standard_normal((1, 5, 8)).astype(np.float32) for _ in range(2))
    past = np.zeros((1, 1, 0, 8), np.float32)
    feed = {"q": np.zeros((1, 5, 16), np.float32), "k": k, "v": v}
    feed |= {"pk": past, "pv": past}
    _, key, value = evaluate(model, feed)
    scale = scales["pk"]
    np.testing.assert_allclose(key[0, 0], np.rint(k[0] / scale) * scale, rtol=1e-6)
    np.testing.assert_allclose(value[0, 0], np.rint(v[0] / scale) * scale, rtol=1e-6)


def test_an_attention_without_known_scales_is_left_alone() -> None:
    model = graph(ATTENTION)
    report = pipeline.run(model, [QuantizeKVPass({})])[1]
    assert report.passes[0].fired == 0
    assert "no KV cache with known scales" in report.refusals[0][1].reason


def test_scales_are_the_largest_magnitudes_at_all_positions(tmp_path: Path) -> None:
    path = save(export_model(write_tiny("llama", tmp_path / "checkpoint")), tmp_path / "float.onnx")
    near = kv_scales(path, WINDOWS, context_length=32)
    far = kv_scales(path, WINDOWS, context_length=128)
    assert near["past_key_values.0.key"].shape == (16,)
    assert np.array_equal(near["past_key_values.0.value"], far["past_key_values.0.value"])
    assert not np.array_equal(near["past_key_values.0.key"], far["past_key_values.0.key"])


def test_too_little_text_and_bad_weights_are_named(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    path = save(model, tmp_path / "float.onnx")
    with pytest.raises(UsageError, match="the calibration text has 32 tokens; at least 128"):
        kv_scales(path, WINDOWS[:1], context_length=CONTEXT)
    norm = model.graph.initializers["model.layers.1.input_layernorm.weight"]
    norm.const_value = ir.tensor(np.full(32, np.nan, np.float32), name=norm.name)
    broken = save(model, tmp_path / "broken.onnx")
    with pytest.raises(GraphError, match=r"present\.1\.key holds NaN or infinity"):
        kv_scales(broken, WINDOWS, context_length=CONTEXT)
