"""Decoders with positions in time, height and width on carryall's kernels: the rope is inside attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_qwen_vls import CONFIGS
from tiny_vlms import write_vlm

import carryall
from carryall.graph_opt.graph.saving import save_model
from carryall.providers import get_provider
from carryall.providers.base import Row, Runner, RunnerConfig
from carryall.providers.native.library import find_library, kernel_library
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.lowering import image_inputs
from carryall.runtime.models.model_source import resolve_model

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

TOKENS = np.arange(1, 41)
# Of a picture of 24 tokens between texts: time, height, width; the text goes on from the largest.
AXES = np.concatenate(
    [
        np.tile(np.arange(6), (3, 1)),
        np.stack([np.full(24, 6), 6 + np.arange(24) // 8, 6 + np.arange(24) % 8]),
        np.tile(np.arange(14, 24), (3, 1)),
    ],
    axis=1,
)


def wide(family: str, folder: Path) -> Path:
    """A package whose heads have 32 elements: 16 angles, a vector of the kernels."""
    config: dict[str, Any] = CONFIGS[family]
    text = dict(config.get("text_config", config))
    rope = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    text |= {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    text[rope] = {**text[rope], "mrope_section": [4, 6, 6]}
    tower = {**config["vision_config"]}
    tower["hidden_size" if family == "qwen2_vl" else "out_hidden_size"] = 64
    changes = {**text, "vision_config": tower}
    if "text_config" in config:
        changes = {"text_config": text, "vision_config": tower}
    carryall.export(write_vlm(folder / "checkpoint", family, **changes), folder / "package")
    return folder / "package"


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(request.param, tmp_path_factory.mktemp("wide"))


def opened(
    package: Path, folder: Path, quantize: str | None = None, **options: Any
) -> tuple[Runner, list[str]]:
    """A runner of the lowered decoder, and the operators of its graph."""
    provider = get_provider("cpu")
    options = {"kv_cache": "float32", **options}
    config = provider.resolve_options(
        RunnerConfig(max_slots=3, context_length=64, num_threads=1, options=options)
    )
    model = lower(resolve_model(package, quantize=quantize), provider, config, [image_inputs()])
    save_model(model, folder / "lowered.onnx")
    return provider.runner(folder / "lowered.onnx", config), [node.op_type for node in model.graph]


def logits(runner: Runner, pieces: Sequence[int], *, slot: int = 0, beside: bool = False) -> Any:
    """The logits of all tokens, computed in pieces, alone or beside a text of another slot."""
    runner.release(slot)
    runner.release(2)
    found, start = [], 0
    for step, count in enumerate(pieces):
        part = slice(start, start + count)
        rows = [Row(slot, TOKENS[part], start, num_logits=count, rope_positions=AXES[:, part])]
        if beside:
            rows.insert(0, Row(2, TOKENS[:1], step))
        found.append(runner.forward(rows)[-1].copy())
        start += count
    return np.concatenate(found)


@pytest.mark.long
def test_attention_turns_queries_and_keys_with_all_axes(package: Path, tmp_path: Path) -> None:
    runner, operators = opened(package, tmp_path)
    assert "PagedAttention" in operators
    assert "RotaryEmbedding" not in operators
    found = logits(runner, [len(TOKENS)])
    runner.close()
    reference, _ = opened(package, tmp_path, kernels="onnxruntime", kv_memory="explicit")
    expected = logits(reference, [len(TOKENS)])
    reference.close()
    # AMX multiplies floats as sums of two bfloat16, whose errors the random network amplifies.
    bound = 1e-3 if kernel_library().isa == "amx" else 3e-5
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())
    assert np.abs(expected).max() > 1


def test_pieces_and_neighbours_change_no_bit(package: Path, tmp_path: Path) -> None:
    runner, _ = opened(package, tmp_path)
    expected = logits(runner, [len(TOKENS)])
    for pieces in ([7, 1, 13, 19], [39, 1], [1] * 40):
        np.testing.assert_array_equal(logits(runner, pieces, slot=1, beside=True), expected)
    runner.close()


@pytest.mark.long
def test_all_layers_of_a_quantized_decoder_are_one_section(package: Path, tmp_path: Path) -> None:
    runner, operators = opened(package, tmp_path, "int8-fast")
    runner.close()
    assert operators.count("Chain") == 1
    assert not {"PagedAttention", "RotaryEmbedding"} & set(operators)
