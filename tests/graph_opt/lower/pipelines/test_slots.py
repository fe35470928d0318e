"""The slot lowering on every family: results, structure and cost."""

from __future__ import annotations

import cProfile
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter import demo
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.graph_facts import count_operators
from carryall.graph_opt.lower.kernels import CPU, Kernels
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.passes.base import pass_name
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.pipeline.report import PipelineReport
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

DEMO = Path(demo.__file__).parent / "pycoder"
CONTEXT = 64
BARE = Kernels(rotary_in_attention=False, packed_qkv=False, skip_norm=False, quick_gelu=False)
EXACT = dataclasses.replace(CPU, accuracy_level=1)
# Ropes inside and outside of the kernel (head size 8), norms of q and k, windows, layers without rope.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 16}),
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 16}),
    ("qwen2", {"head_dim": 16}),
    ("qwen3", {}),
    ("smollm3", {"head_dim": 16}),
    ("phi3", {}),
    ("gemma3_text", {"head_dim": 16}),
    ("gpt2", {}),
]
IDS = ["-".join([family, *map(str, overrides)]) for family, overrides in CASES]


def lower(model: ir.Model, kernels: Kernels = CPU, context: int = CONTEXT) -> PipelineReport:
    options = SlotOptions(context_length=context, kernels=kernels)
    return pipeline.run(model, slot_passes(options), debug=True)[1]


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def worst(portable: Path, lowered: Path) -> float:
    """Return the largest relative difference of logits over every kind of run of the contract."""
    rng = np.random.default_rng(0)
    runs: list[dict[int, int]] = [
        {0: 20, 1: 3, 2: 11},  # several fresh prompts, padded on the right
        {0: 1, 1: 1, 2: 1},  # a ragged decode step
        {1: 5},  # a piece on a cache
        {0: 1, 2: 1},  # a decode step with an idle slot between active ones
        {3: 9},  # a prompt that joins later
        {0: 1, 1: 1, 2: 1, 3: 1},
    ]
    first, second = PortableRunner(portable), SlotGraphRunner(lowered, slots=4, max_length=CONTEXT)
    result = 0.0
    for run in runs:
        rows = {row: rng.integers(0, 256, count) for row, count in run.items()}
        left, right = first.forward(rows), second.forward(rows)
        for row in rows:
            result = max(result, float(np.abs(left[row] - right[row]).max() / np.abs(left[row]).max()))
    return result


@pytest.mark.long
@pytest.mark.parametrize("kernels", [CPU, BARE], ids=["cpu", "bare"])
@pytest.mark.parametrize(("family", "overrides"), CASES, ids=IDS)
def test_lowered_equals_portable(
    family: str, overrides: dict[str, Any], kernels: Kernels, tmp_path: Path
) -> None:
    checkpoint = write_tiny(family, tmp_path / "checkpoint", **overrides)
    portable = save(export_model(checkpoint), tmp_path / "portable.onnx")
    model = export_model(checkpoint)
    if (
        family == "phi3"
    ):  # the portable graph's rope depends on the length of each run, the lowered graph's does not
        return_to_short_context(model, tmp_path, portable, kernels)
        return
    lower(model, kernels)
    assert worst(portable, save(model, tmp_path / "lowered.onnx")) < 1e-5


def test_a_graph_from_the_middle_of_the_lowering_can_be_compared(tmp_path: Path) -> None:
    """Bisection runs graphs that have slots already, but still return the logits of all tokens."""
    portable = save(export_model(write_tiny("llama", tmp_path / "checkpoint")), tmp_path / "portable.onnx")
    passes = slot_passes(SlotOptions(context_length=CONTEXT, kernels=CPU))
    first = [pass_name(one) for one in passes].index("SelectLogits")
    half = pipeline.run(ir.load(portable), passes[:first])[0]
    assert not any(value.name == "logits_positions" for value in half.graph.inputs)
    assert worst(portable, save(half, tmp_path / "half.onnx")) < 1e-5


def return_to_short_context(model: ir.Model, folder: Path, portable: Path, kernels: Kernels) -> None:
    """Return a long rope at its original context of 16, where only the short factors apply."""
    lower(model, kernels, context=16)
    lowered = save(model, folder / "lowered.onnx")
    first, second = PortableRunner(portable), SlotGraphRunner(lowered, slots=1, max_length=16)
    for count in (9, 1, 5):
        tokens = np.arange(count)
        left, right = first.forward({0: tokens})[0], second.forward({0: tokens})[0]
        np.testing.assert_allclose(left, right, atol=1e-5 * float(np.abs(left).max()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "bits", "symmetric"),
    [
        *[(0, 4, True), (0, 8, False), (2, 4, False), (5, 8, True), (9, 4, True)],
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (0, 4, False),
                (0, 8, True),
                (2, 4, True),
                (2, 8, False),
                (5, 4, False),
                (9, 8, False),
            ]
        ],
    ],
)
def test_lowered_quantized_weights_give_equal_results(
    case: int, bits: int, symmetric: bool, tmp_path: Path
) -> None:
    """At accuracy level 1 the kernel computes in fp32, as the portable form does."""
    family, overrides = CASES[case]
    checkpoint = write_tiny(family, tmp_path / "checkpoint", **overrides)
    form = BlockFormat(bits=bits, block_size=16, symmetric=symmetric)
    model = export_model(checkpoint)
    report = pipeline.run(model, [WeightOnlyQuantizationPass(form)], debug=True)[1]
    assert report.passes[0].fired is not None
    assert report.passes[0].fired > 10
    portable = save(model, tmp_path / "portable.onnx")
    lower(model, EXACT)
    assert "MatMul" not in count_operators(model)
    assert "DequantizeLinear" not in count_operators(model)
    assert worst(portable, save(model, tmp_path / "lowered.onnx")) < 1e-5


@pytest.mark.long
def test_int8_activations_add_little_error_to_int4_weights() -> None:
    """Accuracy level 4 rounds activations to 8 bits per block; int4 weights alone cause a KL of 0.09."""
    exact, rounded = export_model(DEMO), export_model(DEMO)
    for model, kernels in ((exact, EXACT), (rounded, CPU)):
        pipeline.run(model, [WeightOnlyQuantizationPass(BlockFormat(block_size=32))])
        lower(model, kernels)
    result = verify(exact, rounded, prompts=[list(range(300, 330))], steps=8)
    assert result.passed
    assert result.tokens is not None
    assert 1e-8 < result.tokens.kl < 2e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides", "limit"),
    [("llama", {"head_dim": 16}, 11), ("mistral", {"head_dim": 16}, 11), ("phi3", {}, 17), ("qwen3", {}, 17)],
)
def test_nodes_per_layer(family: str, overrides: dict[str, Any], limit: int, tmp_path: Path) -> None:
    counts = []
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        model = export_model(write_tiny(family, folder, num_hidden_layers=layers, **overrides))
        counts.append(sum(lower(model).after.values()))
    assert counts[1] - counts[0] <= limit


def test_a_tied_head_reads_the_bytes_of_the_embedding(tmp_path: Path) -> None:
    checkpoint = write_tiny("qwen3", tmp_path / "checkpoint")
    model = export_model(checkpoint)
    pipeline.run(model, [WeightOnlyQuantizationPass(BlockFormat(block_size=16))])
    lower(model)
    gather = next(node for node in model.graph if node.op_type == "GatherBlockQuantized")
    head = next(node for node in model.graph if node.op_type == "MatMulNBits" and "lm_head" in str(node.name))
    assert gather.inputs[0] is head.inputs[1]


def test_lowering_is_linear_in_the_layers(tmp_path: Path) -> None:
    calls = []
    for layers in (2, 8, 32):  # the first size is a warm-up
        folder = tmp_path / str(layers)
        model = export_model(write_tiny("llama", folder, head_dim=16, num_hidden_layers=layers))
        profile = cProfile.Profile()
        profile.runcall(pipeline.run, model, slot_passes(SlotOptions(context_length=CONTEXT)))
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[2] < 4.4 * calls[1]  # four times the layers


def test_the_interface_is_the_contract(tmp_path: Path) -> None:
    model = export_model(write_tiny("gpt2", tmp_path / "checkpoint"))
    lower(model)
    shapes = {str(value.name): str(value.shape) for value in [*model.graph.inputs, *model.graph.outputs]}
    cache = "[batch,4,max_length,8]"
    assert shapes == {
        "input_ids": "[batch,sequence]",
        "position_ids": "[batch,sequence]",
        "seqlens_k": "[batch]",
        "total_sequence_length": "[]",
        "logits_positions": "[batch,wanted]",
        "logits": "[batch,wanted,260]",
        "last_hidden_state": "[batch,sequence,32]",
        **{f"past_key_values.{layer}.{kind}": cache for layer in (0, 1) for kind in ("key", "value")},
        **{f"present.{layer}.{kind}": cache for layer in (0, 1) for kind in ("key", "value")},
    }
    dtypes = {str(value.name): value.dtype for value in model.graph.inputs}
    assert dtypes["seqlens_k"] == dtypes["total_sequence_length"] == ir.DataType.INT32
    assert dtypes["logits_positions"] == ir.DataType.INT64
