"""Layer-by-layer calibration of a float model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import GraphError, UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.quantize.calibration.activations import ActivationReader
from carryall.graph_opt.quantize.search.layerwise import Stage, calibrate_stages

RNG = np.random.default_rng(0)
WINDOWS = [RNG.integers(0, 256, 50) for _ in range(3)]
Floats = npt.NDArray[np.float32]


def record(
    model: ir.Model,
    substitutes: Mapping[str, Floats] | None = None,
    windows: Sequence[npt.NDArray[np.int64]] = WINDOWS,
) -> dict[str, Stage]:
    """Return every stage by the name of its first weight; ``substitutes`` replace weights at their stage."""
    stages: dict[str, Stage] = {}

    def replace(stage: Stage) -> Mapping[str, Floats]:
        stages[str(stage.weights[0].name)] = stage
        given = substitutes or {}
        return {name: given[name] for value in stage.weights if (name := str(value.name)) in given}

    calibrate_stages(model, windows, replace, context_length=64)
    return stages


def reference_moments(path: Path, source: str) -> Floats:
    """Return the moments of a session of the whole model, with windows at the same positions.

    The first token of a window counts at least as much as a sixteenth of the window.
    """
    reader = ActivationReader(path, [source])
    total: Floats = np.zeros((), np.float32)
    for index, tokens in enumerate(WINDOWS):
        rows = reader.read(tokens, 14 * index // 2)[source][0]
        energies = np.sum(rows * rows, axis=1)
        first = max(1.0, len(tokens) / 16 * np.median(energies) / energies[0])
        total = total + rows[1:].T @ rows[1:] + first * np.outer(rows[0], rows[0])
    return total / np.float32(sum(map(len, WINDOWS)))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "phi3"])
def test_stages_get_the_inputs_of_the_whole_model(family: str, tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    ir.save(export_model(write_tiny(family, tmp_path / "checkpoint")), path)
    model = ir.load(path)
    for stage in record(model).values():
        if stage.source.producer() is not None and "Reshape" not in str(stage.source.name):
            expected = reference_moments(path, str(stage.source.name))
            np.testing.assert_allclose(stage.moments, expected, rtol=1e-4, atol=1e-5)
    every = [
        value
        for value in model.graph.initializers.values()
        if any(use.node.op_type in ("MatMul", "Gemm") and use.idx == 1 for use in value.uses())
        and len(value.shape or ()) == 2
    ]
    assert len(every) == sum(len(stage.weights) for stage in record(model).values())


def test_later_stages_use_the_substituted_weights(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    stages, plain = record(model, {name: 0.5 * tensor.numpy().astype(np.float32)}), record(model)
    before, behind = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(stages[before].moments, plain[before].moments)
    np.testing.assert_allclose(4 * stages[behind].moments, plain[behind].moments, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_experts_get_the_inputs_of_the_tokens_routed_to_them(tmp_path: Path) -> None:
    """An expert without tokens has equal inputs."""
    options: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 1, "mlp_only_layers": []}
    model = export_model(write_tiny("qwen3_moe", tmp_path / "checkpoint", **options))
    router = model.graph.initializers["model.layers.1.mlp.gate.weight"]
    assert router.const_value is not None
    twins = router.const_value.numpy().copy()
    twins[:, 5] = twins[:, 4]  # of two equal scores, TopK takes the first
    router.const_value = ir.tensor(twins, name=router.name)
    names = [f"model.layers.1.mlp.experts.{index}.gate_proj.weight" for index in range(6)]
    plain = record(model)
    for name in names[:5]:
        expected = expert_moments(model, tmp_path, str(plain[name].source.name))
        np.testing.assert_allclose(plain[name].moments, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(plain[names[5]].moments, np.eye(32))


def expert_moments(model: ir.Model, folder: Path, source: str) -> Floats:
    """``reference_moments`` of an expert's inputs [tokens routed to it, hidden]."""
    ir.save(model, folder / "float.onnx")
    reader = ActivationReader(folder / "float.onnx", [source])
    total, count = np.zeros((32, 32), np.float32), 0
    for index, tokens in enumerate(WINDOWS):
        rows = reader.read(tokens, 14 * index // 2)[source]
        if len(rows):
            energies = np.sum(rows * rows, axis=1)
            first = max(1.0, len(rows) / 16 * np.median(energies) / energies[0])
            total = total + rows[1:].T @ rows[1:] + first * np.outer(rows[0], rows[0])
        count += len(rows)
    return total / np.float32(count)


@pytest.mark.slow
def test_memory_is_independent_of_the_number_of_layers(tmp_path: Path) -> None:
    """A model of many layers needs no more memory than one of few."""

    def substitute(stage: Stage) -> Mapping[str, Floats]:
        return {
            str(value.name): value.const_value.numpy().astype(np.float32)
            for value in stage.weights
            if value.const_value is not None
        }

    peaks = []
    for layers in (2, 12):
        folder = write_tiny("llama", tmp_path / str(layers), num_hidden_layers=layers, hidden_size=128,
                            intermediate_size=512, num_attention_heads=4, head_dim=32)  # fmt: skip
        model = export_model(folder)
        calibrate_stages(model, WINDOWS, substitute, context_length=64)
        tracemalloc.start()
        calibrate_stages(model, WINDOWS, substitute, context_length=64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    layer = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 512)
    assert peaks[1] < peaks[0] + layer  # for ten more layers


def test_nan_values_and_short_texts_are_refused(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    with pytest.raises(UsageError, match="20 tokens; at least 128"):
        calibrate_stages(model, [np.arange(20)], lambda _: {}, context_length=64)
    norm = model.graph.initializers["model.layers.1.input_layernorm.weight"]
    norm.const_value = ir.tensor(np.full(32, np.inf, np.float32), name=norm.name)
    with pytest.raises(GraphError, match=r"model.layers.1.input_layernorm.* holds NaN or infinity"):
        record(model)


def test_external_weights_are_supported(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint", hidden_size=96))
    expected = record(model)
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")  # includes norms of 384 bytes
    found = record(ir.load(tmp_path / "model.onnx"))
    assert found.keys() == expected.keys()
    for name, stage in found.items():
        np.testing.assert_array_equal(stage.moments, expected[name].moments)
