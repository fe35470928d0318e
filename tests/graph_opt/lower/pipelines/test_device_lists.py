"""The lowered graphs of cuda, directml and tensorrt, computed with the CPU's kernels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from logits_agreement import worst
from onnx.reference import ReferenceEvaluator
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import GraphRunner, PortableRunner, SlotGraphRunner
from carryall.graph_opt.graph.edit import MICROSOFT, insert, nodes_of
from carryall.graph_opt.lower.kernels import CUDA, DIRECTML, Kernels
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.pipelines.standard import standard_passes
from carryall.graph_opt.lower.products.weight_only_products import WeightOnlyProductsPass
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.normalize.float_compute import FloatComputePass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.calibration.calibrators import min_max
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
from carryall.graph_opt.quantize.search.ranges import input_histograms

CONTEXT = 16  # the original context of phi3's long rope
FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen3": {},
    "gemma3_text": {"head_dim": 16},
    "gpt2": {},
    "phi3": {},
    "smollm3": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "qwen2": {"head_dim": 16},
}
QUICK = [*list(FAMILIES)[:4], *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAMILIES)[4:])]


class NormsOutsidePass(GraphPass):
    """Undo ``NormsInAttentionPass``, because the CPU's attention kernel refuses norms."""

    def rewrite(self, graph: ir.Graph) -> None:
        for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
            if len(node.inputs) < 16:
                continue
            heads = [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")]
            sizes = np.array([heads[0], heads[1], heads[1]]) * int(node.inputs[14].shape[0])  # type: ignore
            split = ir.Value(name=f"{node.name}.sizes", const_value=ir.tensor(sizes, name=f"{node.name}.s"))
            graph.register_initializer(split)
            parts = insert(node, "Split", [node.inputs[0], split], {"axis": -1}, num_outputs=3).outputs
            epsilon = node.attributes["qk_norm_epsilon"].as_float()
            for place, count in enumerate(heads):
                node.replace_input_with(place, _normalised(graph, node, parts[place], place, count, epsilon))
            node.replace_input_with(2, parts[2])
            node.resize_inputs(14)
            del node.attributes["qk_norm_epsilon"]
            self.fired += 1


def _normalised(
    graph: ir.Graph, node: ir.Node, value: ir.Value, place: int, heads: int, epsilon: float
) -> ir.Value:
    def shape(*sizes: int) -> ir.Value:
        name = f"{node.name}.{place}.{len(sizes)}"
        constant = ir.Value(name=name, const_value=ir.tensor(np.array(sizes), name=name))
        graph.register_initializer(constant)
        return constant

    four = insert(node, "Reshape", [value, shape(0, 0, heads, -1)]).outputs[0]
    operands = [four, node.inputs[14 + place]]
    normal = insert(node, "RMSNormalization", operands, {"epsilon": epsilon}).outputs[0]
    return insert(node, "Reshape", [normal, shape(0, 0, -1)]).outputs[0]


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def lower(model: ir.Model, kernels: Kernels, compute: ir.DataType | None) -> ir.Model:
    options = SlotOptions(context_length=CONTEXT, kernels=kernels, compute=compute)
    report = pipeline.run(model, slot_passes(options), debug=True)[1]
    assert "Attention" not in report.after
    return model


def portable(family: str, folder: Path, **overrides: Any) -> tuple[GraphRunner, ir.Model]:
    """Return the expected logits and a model to lower."""
    checkpoint = write_tiny(family, folder / "checkpoint", **{**FAMILIES.get(family, {}), **overrides})
    path = save(export_model(checkpoint), folder / "portable.onnx")
    return PortableRunner(path), export_model(checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("compute", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", QUICK)
def test_cuda_graphs_compute_the_model(family: str, compute: ir.DataType, tmp_path: Path) -> None:
    """fp16 runs in the CPU's fp16 kernels; bf16, without CPU kernels, is converted to float."""
    expected, model = portable(family, tmp_path)
    lower(model, CUDA, compute)
    undo: list[ir.passes.PassBase] = [NormsOutsidePass()]
    pipeline.run(model, undo if compute == FP16 else [*undo, FloatComputePass()])
    bar = 1.5e-2 if compute == FP16 else 4e-2
    lowered = SlotGraphRunner(save(model, tmp_path / "lowered.onnx"), slots=2, max_length=CONTEXT)
    assert worst(expected, lowered) < bar


@pytest.mark.long
@pytest.mark.parametrize("compute", [None, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("family", QUICK)
def test_directml_graphs_compute_the_model(family: str, compute: ir.DataType | None, tmp_path: Path) -> None:
    expected, model = portable(family, tmp_path, **({"sliding_window": CONTEXT} if family != "gpt2" else {}))
    lower(model, DIRECTML, compute)
    assert model.graph.opset_imports[""] == 21
    lowered = SlotGraphRunner(save(model, tmp_path / "lowered.onnx"), slots=2, max_length=CONTEXT)
    assert worst(expected, lowered) < (1e-5 if compute is None else 1e-2)


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kernels", [CUDA, DIRECTML], ids=["cuda", "directml"])
def test_quantized_weights_give_equal_results(kernels: Kernels, bits: int, tmp_path: Path) -> None:
    checkpoint = write_tiny("qwen3", tmp_path / "checkpoint", tie_word_embeddings=True)
    form = BlockFormat(bits=bits, block_size=16, symmetric=True)
    exact, model = export_model(checkpoint), export_model(checkpoint)
    for one in (exact, model):
        pipeline.run(one, [WeightOnlyQuantizationPass(form)])
    path = save(exact, tmp_path / "portable.onnx")
    lower(model, kernels, FP16)
    counts = [node.op_type for node in model.graph]
    assert "DequantizeLinear" not in counts
    assert counts.count("MatMulNBits") >= 8
    if kernels is DIRECTML:
        assert all(len(node.inputs) == 4 for node in nodes_of(model.graph, "MatMulNBits", MICROSOFT))
    pipeline.run(model, [NormsOutsidePass()])
    lowered = SlotGraphRunner(save(model, tmp_path / "lowered.onnx"), slots=2, max_length=CONTEXT)
    assert worst(PortableRunner(path), lowered) < 1e-2


@pytest.mark.long
@pytest.mark.parametrize("compute", [None, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("family", QUICK)
def test_tensorrt_graphs_compute_the_model(family: str, compute: ir.DataType | None, tmp_path: Path) -> None:
    expected, model = portable(family, tmp_path)
    pipeline.run(model, standard_passes(CONTEXT, compute), debug=True)
    assert {node.domain for node in model.graph} == {""}
    assert not {"Attention", "RMSNormalization", "RotaryEmbedding"} & {node.op_type for node in model.graph}
    lowered = PortableRunner(save(model, tmp_path / "lowered.onnx"))
    assert worst(expected, lowered) < (1e-5 if compute is None else 1e-2)


@pytest.mark.long
def test_a_tensorrt_graph_computes_layers_that_share_a_cache(tmp_path: Path) -> None:
    expected, model = portable("gemma4_text", tmp_path)
    pipeline.run(model, standard_passes(CONTEXT), debug=True)
    assert "Attention" not in {node.op_type for node in model.graph}
    assert worst(expected, PortableRunner(save(model, tmp_path / "lowered.onnx"))) < 1e-5


def test_captured_runs_compute_positions_on_the_device(tmp_path: Path) -> None:
    """Only shapes are computed on the host; only attention reads ``total_sequence_length``."""
    model = lower(export_model(write_tiny("gpt2", tmp_path / "checkpoint")), CUDA, FP16)
    total = next(value for value in model.graph.inputs if value.name == "total_sequence_length")
    assert {use.node.op_type for use in total.uses()} == {"GroupQueryAttention"}
    host = {str(node.op_type) for node in model.graph if node.op_type in ("Where", "Equal")}
    assert host == set()


def test_windows_and_soft_caps_that_directml_would_ignore_are_refused(tmp_path: Path) -> None:
    model = export_model(write_tiny("mistral", tmp_path / "checkpoint", head_dim=16))
    with pytest.raises(
        GraphError,
        match=r"was not lowered to .* refused this node: GroupQueryAttention: .* no sliding window",
    ):
        pipeline.run(model, slot_passes(SlotOptions(context_length=CONTEXT, kernels=DIRECTML)))
    # The window of the tiny model is 5 tokens, so every token is inside of it.
    model = export_model(tmp_path / "checkpoint")
    pipeline.run(model, slot_passes(SlotOptions(context_length=5, kernels=DIRECTML)))


def test_onnxruntime_accepts_head_norms_inside_attention(tmp_path: Path) -> None:
    """The schema accepts them; only CUDA's kernel computes them, and the CPU's refuses the run."""
    model = lower(export_model(write_tiny("qwen3", tmp_path / "checkpoint")), CUDA, FP16)
    nodes = list(nodes_of(model.graph, "GroupQueryAttention", MICROSOFT))
    assert [len(node.inputs) for node in nodes] == [16, 16]
    runner = SlotGraphRunner(save(model, tmp_path / "lowered.onnx"), slots=1, max_length=CONTEXT)
    with pytest.raises(Exception, match="q_norm_weight"):
        runner.forward({0: np.arange(3)})


def test_head_norms_add_no_nodes_on_cuda(tmp_path: Path) -> None:
    counts = []
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        model = export_model(write_tiny("qwen3", folder, num_hidden_layers=layers))
        counts.append(len(list(lower(model, CUDA, FP16).graph)))
    assert counts[1] - counts[0] <= 11
    bare = dataclasses.replace(CUDA, norms_in_attention=False)
    model = lower(export_model(write_tiny("qwen3", tmp_path / "bare")), bare, FP16)
    assert len(list(model.graph)) > counts[0]


def test_tensorrt_graphs_run_in_the_reference_evaluator(tmp_path: Path) -> None:
    """TensorRT's graph has only standard operators, so ONNX's reference evaluator runs it."""
    expected, model = portable("qwen3", tmp_path)
    pipeline.run(model, standard_passes(CONTEXT))
    tokens = np.arange(4)
    feed: dict[str, Any] = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, 4), np.int64),
        "position_ids": tokens[None],
    }
    for value in model.graph.inputs:
        if str(value.name).startswith("past"):
            feed[str(value.name)] = np.zeros((1, 2, 0, 16), np.float32)
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)  # type: ignore[union-attr]
    logits = ReferenceEvaluator(ir.to_proto(model)).run(["logits"], feed)[0]  # type: ignore[index]
    np.testing.assert_allclose(logits[0], expected.forward({0: tokens})[0], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("method", ["static", "dynamic"])
@pytest.mark.parametrize("kernels", [CUDA, DIRECTML], ids=["cuda", "directml"])
def test_integer_products_become_weight_only_where_there_are_no_kernels(
    kernels: Kernels, method: str, tmp_path: Path
) -> None:
    """The int8 weights are the same, and activations are not rounded."""
    _, model = portable("llama", tmp_path)
    _quantize(model, tmp_path, method)
    weight_only = model.clone()
    lower(model, dataclasses.replace(kernels, float_attention=True), None)
    counts = Counter(node.op_type for node in model.graph)
    assert not {"QuantizeLinear", "DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear"} & set(counts)
    assert counts["MatMulNBits"] >= 8
    pipeline.run(weight_only, [WeightOnlyProductsPass()])
    expected = PortableRunner(save(weight_only, tmp_path / "weight_only.onnx"))
    lowered = SlotGraphRunner(save(model, tmp_path / "lowered.onnx"), slots=2, max_length=CONTEXT)
    assert worst(expected, lowered) < 1e-5


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_tensorrt_keeps_static_integer_products(method: str, tmp_path: Path) -> None:
    _, model = portable("llama", tmp_path)
    _quantize(model, tmp_path, method)
    expected = model.clone()
    pipeline.run(model, standard_passes(CONTEXT))
    counts = Counter(node.op_type for node in model.graph)
    assert not {"MatMulInteger", "DynamicQuantizeLinear"} & set(counts)
    assert (counts["QuantizeLinear"] > 4) is (method == "static")
    pipeline.run(expected, [WeightOnlyProductsPass(static=False)])
    before = PortableRunner(save(expected, tmp_path / "expected.onnx"))
    assert worst(before, PortableRunner(save(model, tmp_path / "lowered.onnx"))) < 1e-4


def _quantize(model: ir.Model, folder: Path, method: str) -> None:
    form = BlockFormat(bits=8, block_size=16, symmetric=True)
    if method == "dynamic":
        pipeline.run(model, [DynamicQuantizationPass(form)])
        return
    windows = [np.random.default_rng(i).integers(0, 256, 12) for i in range(12)]
    histograms = input_histograms(folder / "portable.onnx", windows, context_length=CONTEXT)
    ranges = {name: min_max(histogram) for name, histogram in histograms.items()}
    pipeline.run(model, [StaticQuantizationPass(form, ranges)])
