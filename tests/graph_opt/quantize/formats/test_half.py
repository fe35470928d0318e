"""fp16 and bf16: 16-bit values, fp32 values, and values out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph
from tiny_models import write_tiny

from carryall.errors import GraphError, UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.half import HalfPrecisionPass, is_half
from carryall.graph_opt.quantize.formats.half_pass import HALF_TYPES
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

RNG = np.random.default_rng(0)
FP16, BF16 = HALF_TYPES["fp16"], HALF_TYPES["bf16"]
TOKENS = RNG.integers(0, 256, 20)
MODEL = """g (int64[B, S] input_ids) => (float[B, S, 4] logits)
    { h = Gather(table, input_ids) a = MatMul(h, w) b = Add(h, a) logits = MatMul(b, w) }"""
TABLE, W = RNG.standard_normal((9, 4)).astype(np.float32), RNG.standard_normal((4, 4)).astype(np.float32)


def exported(family: str, folder: Path, **overrides: Any) -> ir.Model:
    return export_model(write_tiny(family, folder / "checkpoint", **overrides))


def saved(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def converted(model: ir.Model, dtype: ir.DataType = FP16, **options: Any) -> ir.Model:
    assert pipeline.run(model, [HalfPrecisionPass(dtype, **options)])[1].refusals == []
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3", "smollm3"])
def test_fp16_runs_near_the_float_model(family: str, tmp_path: Path) -> None:
    exact = PortableRunner(saved(exported(family, tmp_path), tmp_path / "float.onnx"))
    half = PortableRunner(saved(converted(ir.load(tmp_path / "float.onnx")), tmp_path / "half.onnx"))
    assert (tmp_path / "half.onnx.data").stat().st_size < 0.51 * (tmp_path / "float.onnx.data").stat().st_size
    for count in (20, 1, 3):  # fresh, and on a cache of 16 bits
        left, right = (runner.forward({0: TOKENS[:count]})[0] for runner in (exact, half))
        assert right.dtype == np.float32
        np.testing.assert_allclose(right, left, atol=1e-2 * float(np.abs(left).max()))


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_targets_without_16_bit_kernels_compute_in_float(dtype: ir.DataType, tmp_path: Path) -> None:
    """bf16 weights are restored exactly, fp16 weights within rounding."""
    exact = PortableRunner(saved(exported("llama", tmp_path, head_dim=16), tmp_path / "float.onnx"))
    model = converted(ir.load(tmp_path / "float.onnx"), dtype)
    report = pipeline.run(model, slot_passes(SlotOptions(context_length=64)), debug=True)[1]
    assert report.refusals == []
    types = {value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values())}
    assert types == {ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32}
    lowered = SlotGraphRunner(saved(model, tmp_path / "lowered.onnx"), slots=1, max_length=64)
    for count in (20, 1):
        left, right = (runner.forward({0: TOKENS[:count]})[0] for runner in (exact, lowered))
        np.testing.assert_allclose(right, left, atol=1e-3 * float(np.abs(left).max()))


def test_types_of_the_contract(tmp_path: Path) -> None:
    model = converted(exported("gemma3_text", tmp_path, final_logit_softcapping=30.0), BF16)
    types = {str(value.name): value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert types["logits"] == ir.DataType.FLOAT
    assert {types[name] for name in types if "past" in name or "present" in name} == {BF16}
    assert is_half(model.graph)
    for node in nodes_of(model.graph, "Attention"):
        assert node.attributes["softmax_precision"].as_int() == ir.DataType.FLOAT.value
    for op_type in ("Cos", "Sin", "Tanh", "Where"):  # rope, soft cap of the logits, mask
        nodes = list(nodes_of(model.graph, op_type))
        assert nodes
        assert {node.outputs[0].dtype for node in nodes} == {ir.DataType.FLOAT}
    assert {node.outputs[0].dtype for node in nodes_of(model.graph, "RMSNormalization")} == {BF16}
    assert "model.layers.0.mlp.down_proj.weight" in model.graph.initializers


def test_a_fully_padded_row_is_finite(tmp_path: Path) -> None:
    """The lowest float would be -inf in 16 bits, and a softmax of only -inf is NaN."""
    model = converted(exported("llama", tmp_path))
    feed: dict[str, Any] = {
        "input_ids": np.ones((2, 3), np.int64),
        "attention_mask": np.array([[0, 0, 0], [0, 1, 1]]),
    }
    feed["position_ids"] = np.tile(np.arange(3), (2, 1))
    for value in model.graph.inputs:
        if str(value.name).startswith("past") and value.shape is not None:
            feed[str(value.name)] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float16)
    assert np.isfinite(evaluate(model, feed)[0]).all()


def test_sums_and_powers_stay_float() -> None:
    text = """g (int64[B, S] input_ids) => (float[B, S, 4] logits)
        { h = Gather(table, input_ids) p = Mul(h, h) m = ReduceMean <keepdims=1> (p, axes) r = Sqrt(m)
          n = Div(h, r) logits = MatMul(n, w) }"""
    model = converted(graph(text, table=TABLE, w=W, axes=np.array([-1])))
    outputs = {node.op_type: node.outputs[0].dtype for node in model.graph}
    expected = {"Gather": FP16, "ReduceMean": ir.DataType.FLOAT, "Sqrt": ir.DataType.FLOAT, "MatMul": FP16}
    assert expected.items() <= outputs.items()


def test_values_that_are_too_large_stay_float() -> None:
    large, ids = {"table": TABLE, "w": 1e4 * W}, {"input_ids": np.arange(9)[None]}
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(evaluate(converted(graph(MODEL, **large)), ids)[0]).all()
    pass_, model = HalfPrecisionPass(FP16, keep_float=["a", "b", "logits"]), graph(MODEL, **large)
    pass_(model)
    assert {refusal.reason for refusal in pass_.refusals} == {
        "a exceeds the range of FLOAT16, so the node stays float",
        "b exceeds the range of FLOAT16, so the node stays float",
    }
    exact = evaluate(graph(MODEL, **large), ids)[0]
    np.testing.assert_allclose(evaluate(model, ids)[0], exact, atol=2e-3 * float(np.abs(exact).max()))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1e5, FP16, "weight w reaches 1e.05, above the limit 65504 of FLOAT16; use bf16 instead"),
        (3.4e38, BF16, "weight w reaches 3.4e.38, above the limit 3.38953e.38 of BFLOAT16"),
        (np.nan, FP16, "weight w holds NaN or infinity"),
        (np.inf, BF16, "weight w holds NaN or infinity"),
    ],
)
def test_weights_out_of_range_are_named(value: float, dtype: ir.DataType, message: str) -> None:
    broken = W.copy()
    broken[1, 2] = value
    model = converted(graph(MODEL, table=TABLE, w=broken), dtype)
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    with pytest.raises(GraphError, match=message):
        tensor.numpy()


def test_quantized_weights_are_dequantized_to_16_bits(tmp_path: Path) -> None:
    model = exported("qwen3", tmp_path)
    pipeline.run(model, [WeightOnlyQuantizationPass(BlockFormat(bits=4, block_size=16))])
    exact = PortableRunner(saved(model, tmp_path / "int4.onnx")).forward({0: TOKENS})[0]
    half = converted(ir.load(tmp_path / "int4.onnx"))
    assert {node.outputs[0].dtype for node in nodes_of(half.graph, "DequantizeLinear")} == {FP16}
    result = PortableRunner(saved(half, tmp_path / "half.onnx")).forward({0: TOKENS})[0]
    np.testing.assert_allclose(result, exact, atol=1e-2 * float(np.abs(exact).max()))


def test_conversion_is_idempotent_and_other_types_are_refused() -> None:
    model = converted(graph(MODEL, table=TABLE, w=W))
    assert apply(HalfPrecisionPass(FP16), model) == []
    assert len([*nodes_of(model.graph, "Cast")]) == 1  # the logits
    with pytest.raises(UsageError, match="half precision must be FLOAT16 or BFLOAT16, found INT8"):
        HalfPrecisionPass(ir.DataType.INT8)
