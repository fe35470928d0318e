"""Mixtures of experts as one operator in the CPU's kernels, compared with the portable graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from logits_agreement import worst
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.lower.kernels import CPU, CUDA, DIRECTML, ExpertKernels, Kernels
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.products.moe import FusedExpertsPass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

CONTEXT = 16
EXACT_CPU = dataclasses.replace(CPU, accuracy_level=0)  # fp32 activations allow tight tolerances
CUDA_ON_CPU = dataclasses.replace(CUDA, norms_in_attention=False, float_attention=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen3_moe-unnormalized": {"moe_intermediate_size": 32, "norm_topk_prob": False},
    "qwen2_moe": {"moe_intermediate_size": 32, "head_dim": 8},
}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}


def exported(family: str, folder: Path, overrides: Mapping[str, Any] = {}) -> ir.Model:
    settings = {**FAMILIES[family], **overrides}
    return export_model(write_tiny(family.split("-")[0], folder / "checkpoint", seed=1, **settings))


def quantize(model: ir.Model, form: BlockFormat, **options: Any) -> ir.Model:
    return pipeline.run(model, [WeightOnlyQuantizationPass(form, **options)])[0]


def lower(model: ir.Model, kernels: Kernels) -> Counter[str]:
    pipeline.run(model, slot_passes(SlotOptions(context_length=CONTEXT, kernels=kernels)), debug=True)
    return Counter(node.op_type for node in model.graph)


def error(expected: ir.Model, lowered: ir.Model, folder: Path) -> float:
    for name, model in (("portable", expected), ("lowered", lowered)):
        ir.save(model, folder / f"{name}.onnx")
    slots = SlotGraphRunner(folder / "lowered.onnx", slots=2, max_length=CONTEXT)
    return worst(PortableRunner(folder / "portable.onnx"), slots)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "symmetric"),
    [
        *[pytest.param(family, True, id=f"{family}-symmetric") for family in sorted(FAMILIES)],
        pytest.param("mixtral", False, id="mixtral-zero-points"),
        *[
            pytest.param(family, False, marks=pytest.mark.slow, id=f"{family}-zero-points")
            for family in sorted(FAMILIES.keys() - {"mixtral"})
        ],
    ],
)
def test_qmoe_computes_int4_experts(family: str, symmetric: bool, tmp_path: Path) -> None:
    form = BlockFormat(bits=4, block_size=16, symmetric=symmetric)
    expected, model = (quantize(exported(family, tmp_path), form) for _ in range(2))
    counts = lower(model, EXACT_CPU)
    assert (counts["QMoE"], counts["OneHot"], counts["Concat"]) == (2, 0, 0)
    assert error(expected, model, tmp_path) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_moe_computes_float_experts(family: str, tmp_path: Path) -> None:
    expected, model = (exported(family, tmp_path) for _ in range(2))
    counts = lower(model, CUDA_ON_CPU)
    assert (counts["MoE"], counts["OneHot"]) == (2, 0)
    for node in [node for node in model.graph if node.op_type == "MoE"]:
        # Without normalisation the CPU's kernel returns zeros and overwrites its input.
        model.graph.outputs.append(_typed(node.inputs[0]))
    assert error(expected, model, tmp_path) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_graph_for_cuda_computes_the_model(family: str, tmp_path: Path) -> None:
    expected, model = (
        quantize(exported(family, tmp_path, WIDE), BlockFormat(block_size=32)) for _ in range(2)
    )
    counts = lower(model, CUDA_ON_CPU)
    assert counts["QMoE"] == 2
    fused = next(node for node in model.graph if node.op_type == "QMoE")
    assert fused.attributes["weights_prepacked"].as_int() == 0
    assert error(expected, model, tmp_path) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_8_bit_experts_round_activations_as_separate_products(family: str, tmp_path: Path) -> None:
    form = BlockFormat(bits=8, block_size=32)
    apart, fused = (quantize(exported(family, tmp_path, WIDE), form) for _ in range(2))
    assert lower(apart, dataclasses.replace(CPU, experts=ExpertKernels()))["QMoE"] == 0
    assert lower(fused, CPU)["QMoE"] == 2
    runners = []
    for name, model in (("apart", apart), ("fused", fused)):
        ir.save(model, tmp_path / f"{name}.onnx")
        runners.append(SlotGraphRunner(tmp_path / f"{name}.onnx", slots=2, max_length=CONTEXT))
    assert worst(*runners) < 1e-5


@pytest.mark.long
def test_cuda_is_told_not_to_normalise(tmp_path: Path) -> None:
    model = quantize(exported("qwen3_moe-unnormalized", tmp_path, WIDE), BlockFormat(block_size=32))
    lower(model, CUDA_ON_CPU)
    fused = next(node for node in model.graph if node.op_type == "QMoE")
    assert fused.attributes["normalize_routing_weights"].as_int() == 0
    assert len(fused.inputs) < 15


def _typed(value: ir.Value | None) -> ir.Value:
    assert value is not None
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value


def refusals(model: ir.Model, kernels: Kernels) -> set[str]:
    fusing = FusedExpertsPass(kernels.experts)
    pipeline.run(model, [fusing])
    assert not fusing.fired
    return {refusal.reason for refusal in fusing.refusals}


@pytest.mark.parametrize(
    ("kernels", "overrides", "form", "reason"),
    [
        (CPU, {}, None, "no MoE for float weights"),
        (DIRECTML, {}, BlockFormat(block_size=16), "no QMoE for 4 bits"),
        (DIRECTML, {}, BlockFormat(bits=8, block_size=16), "no QMoE for 8 bits"),
        (CPU, {}, BlockFormat(block_size=32), "experts of this size"),
        (CUDA, {}, BlockFormat(block_size=16), "experts of this size"),
        (
            CUDA,
            WIDE,
            BlockFormat(block_size=16, symmetric=False),
            "needs a block size of 32 or more for zero points",
        ),
        (CPU, {"hidden_act": "gelu"}, BlockFormat(block_size=16), "activation is not SiLU"),
    ],
)
def test_mixtures_without_a_kernel_stay(
    kernels: Kernels, overrides: dict[str, Any], form: BlockFormat | None, reason: str, tmp_path: Path
) -> None:
    model = exported("qwen3_moe", tmp_path, overrides)
    found = refusals(model if form is None else quantize(model, form), kernels)
    assert len(found) == 1
    assert reason in found.pop()


def test_experts_of_several_widths_stay(tmp_path: Path) -> None:
    form, eight = BlockFormat(block_size=16), BlockFormat(bits=8, block_size=16)
    names = [f"model.layers.{layer}.mlp.experts.0.up_proj.weight" for layer in (0, 2)]
    model = quantize(exported("qwen3_moe", tmp_path), form, overrides=dict.fromkeys(names, eight))
    assert refusals(model, CPU) == {"the experts' weights differ in bits, block size or zero points"}
    model = quantize(exported("qwen3_moe", tmp_path), form, overrides=dict.fromkeys(names))
    assert refusals(model, CPU) == {"the weights of some experts are float, or have a type without a kernel"}


def test_a_split_without_experts_is_not_a_mixture(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path))
    assert refusals(model, CUDA) == set()
