"""Mixtures of experts lowered to carryall's own operator, and those that it refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.products.quantized_experts import QuantizedExpertsPass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

KERNELS = dataclasses.replace(CPU, quantized_linear=True, paged_attention=True)


def quantized(folder: Path, form: BlockFormat, family: str = "qwen3_moe", **options: Any) -> ir.Model:
    model = export_model(
        write_tiny(family, folder / "checkpoint", dtype=np.float32, moe_intermediate_size=32)
    )
    return pipeline.run(model, [WeightOnlyQuantizationPass(form, **options)])[0]


@pytest.mark.parametrize(
    ("form", "offsets"),
    [
        (BlockFormat(block_size=16), 0),
        (BlockFormat(block_size=16, symmetric=False), 1),
        (BlockFormat(bits=8, block_size=32), 0),
    ],
)
def test_a_mixture_becomes_one_operator(tmp_path: Path, form: BlockFormat, offsets: int) -> None:
    model = quantized(tmp_path, form)
    pipeline.run(model, slot_passes(SlotOptions(context_length=16, kernels=KERNELS, paged=True)))
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["QuantizedExperts"], counts["QMoE"], counts["OneHot"]) == (2, 0, 0)
    node = next(node for node in model.graph if node.op_type == "QuantizedExperts")
    facts = {name: attribute.value for name, attribute in node.attributes.items()}
    assert (facts["bits"], facts["block_size"], facts["offsets"]) == (form.bits, form.block_size, offsets)
    first = node.inputs[2]
    assert first is not None
    assert first.const_value is not None
    assert first.const_value.shape[0] == facts["num_experts"]


def test_a_mixture_of_16_bits_keeps_them(tmp_path: Path) -> None:
    model = export_model(write_tiny("qwen3_moe", tmp_path / "checkpoint", moe_intermediate_size=32))
    pipeline.run(model, slot_passes(SlotOptions(context_length=16, kernels=KERNELS, paged=True)))
    nodes = [node for node in model.graph if node.op_type == "QuantizedExperts"]
    assert len(nodes) == 2
    for node in nodes:
        facts = {name: attribute.value for name, attribute in node.attributes.items()}
        assert (facts["bits"], facts["offsets"], facts["out_bits"], facts["out_offsets"]) == (16, 6, 16, 6)
        experts, hidden, width = facts["num_experts"], facts["hidden"], facts["width"]
        sizes = [value.const_value.nbytes for value in node.inputs[2:4] if value and value.const_value]
        assert sizes == [experts * 2 * 2 * hidden * width, experts * 2 * hidden * width]


def test_biases_are_those_of_the_experts_after_their_nodes_are_gone(tmp_path: Path) -> None:
    checkpoint = write_tiny("gpt_oss", tmp_path / "checkpoint", hidden_size=64, intermediate_size=48)
    model = export_model(checkpoint)
    stem = "model.layers.1.mlp.experts"
    held = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if name.startswith(stem) and name.endswith("bias") and value.const_value is not None
    }
    model = pipeline.run(model, [WeightOnlyQuantizationPass(BlockFormat(block_size=16))])[0]
    pipeline.run(model, slot_passes(SlotOptions(context_length=16, kernels=KERNELS, paged=True)))
    node = [node for node in model.graph if node.op_type == "QuantizedExperts"][1]
    entering, leaving = (
        value.const_value.numpy() for value in node.inputs[4:6] if value and value.const_value
    )
    for expert in range(len(entering)):
        gate, up, down = (held[f"{stem}.{expert}.{part}_proj.bias"] for part in ("gate", "up", "down"))
        np.testing.assert_array_equal(entering[expert], np.concatenate([gate, up]))
        np.testing.assert_array_equal(leaving[expert], down)
        assert gate.any()


@pytest.mark.parametrize("other", [None, BlockFormat(bits=8, block_size=16)], ids=["float", "bits"])
def test_what_the_operator_cannot_compute_is_refused_with_the_reason(
    tmp_path: Path, other: BlockFormat | None
) -> None:
    names = [f"model.layers.{layer}.mlp.experts.0.up_proj.weight" for layer in (0, 2)]
    model = quantized(tmp_path, BlockFormat(block_size=16), overrides=dict.fromkeys(names, other))
    lowering = QuantizedExpertsPass()
    pipeline.run(model, [lowering])
    assert not lowering.fired
    expected = {
        True: "the weights of some experts are float32, or have a type without a kernel",
        False: "the experts' weights differ in bits, block size or zero points",
    }[other is None]
    assert {refusal.reason for refusal in lowering.refusals} == {expected}
