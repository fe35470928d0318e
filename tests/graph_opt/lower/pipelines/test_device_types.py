"""Graphs lowered for CUDA in the types that run there: int8 caches, mixtures of experts, token ids."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest
from lowered_forms import CONTEXT, decoder

from carryall.contract import NUM_TOKENS, is_past
from carryall.graph_opt.graph.edit import MICROSOFT, nodes_of
from carryall.graph_opt.lower.kernels import CUDA, Kernels
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.pipelines.standard import standard_passes
from carryall.graph_opt.pipeline import pipeline

FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def lowered(
    family: str,
    form: str,
    folder: Path,
    compute: ir.DataType = FP16,
    kernels: Kernels = CUDA,
    **options: bool,
) -> ir.Model:
    model = decoder(family, form, folder)
    chosen = SlotOptions(context_length=CONTEXT, kernels=kernels, compute=compute, **options)  # type: ignore[arg-type]
    return pipeline.run(model, slot_passes(chosen))[0]


@pytest.mark.parametrize("form", ["int8-kv", "int8-kv-tensor"])
@pytest.mark.parametrize("compute", [FP16, BF16], ids=["fp16", "bf16"])
def test_scales_of_an_int8_cache_are_float(form: str, compute: ir.DataType, tmp_path: Path) -> None:
    """The kernel declares T_KV_SCALE as tensor(float) in graphs of any type."""
    graph = lowered("llama", form, tmp_path, compute).graph
    assert {value.dtype for value in graph.inputs if is_past(value.name)} == {ir.DataType.INT8}
    for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
        scales = [value for value in node.inputs[12:14] if value is not None]
        assert [scale.dtype for scale in scales] == [ir.DataType.FLOAT] * 2
        content = scales[0].const_value
        assert content is not None
        assert content.numpy() == pytest.approx(0.08)
        assert content.numpy().dtype == "float32"


def test_norms_of_q_and_k_stay_with_an_int8_cache(tmp_path: Path) -> None:
    graph = lowered("qwen3", "int8-kv", tmp_path).graph
    assert len([name for name in graph.initializers if "q_norm" in str(name) or "k_norm" in str(name)]) == 4
    heads = [node for node in nodes_of(graph, "RMSNormalization") if len(node.inputs[0].shape or ()) == 4]  # type: ignore[union-attr]
    assert len(heads) == 4
    assert all(len(node.inputs) == 14 for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT))
    folded = lowered("qwen3", "float", tmp_path).graph
    assert all(len(node.inputs) == 16 for node in nodes_of(folded, "GroupQueryAttention", MICROSOFT))


@pytest.mark.long
@pytest.mark.parametrize("compute", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("form", "operator"), [("float", "MoE"), ("int4-minima", "QMoE")])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_are_fused_in_16_bits(
    family: str, form: str, operator: str, compute: ir.DataType, tmp_path: Path
) -> None:
    graph = lowered(family, form, tmp_path, compute).graph
    counts = Counter(node.op_type for node in graph)
    assert (counts[operator], counts["OneHot"], counts["TopK"]) == (2, 0, 0)
    for node in nodes_of(graph, operator, MICROSOFT):
        assert [value.dtype for value in node.inputs[:2] if value is not None] == [compute, compute]
    apart = lowered(family, form, tmp_path, compute, fused_experts=False).graph
    assert Counter(node.op_type for node in apart)[operator] == 0


def test_the_number_of_token_ids_is_stated(tmp_path: Path) -> None:
    for form in ("float", "int8", "int4-minima"):
        assert lowered("llama", form, tmp_path).metadata_props[NUM_TOKENS] == "260"
    model = pipeline.run(decoder("gpt2", "float", tmp_path), standard_passes(CONTEXT))[0]
    assert model.metadata_props[NUM_TOKENS] == "260"


@pytest.mark.parametrize(
    ("form", "compute", "domain"),
    [("int4", FP16, "carryall"), ("int4", BF16, MICROSOFT), ("int4-minima", FP16, "carryall")],
)
def test_int4_products_of_float16_are_carryalls_where_it_has_a_kernel(
    form: str, compute: ir.DataType, domain: str, tmp_path: Path
) -> None:
    own = dataclasses.replace(CUDA, int4_product=True)
    graph = lowered("llama", form, tmp_path, compute, own).graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert len(products) >= 8
    assert {node.domain for node in products} == {domain}
