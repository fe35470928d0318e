from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from family_cases import normalised, rope
from tiny_models import CONFIGS, write_tiny

from carryall.errors import CheckpointError
from carryall.exporter.config import LENGTH_KEYS, context_lengths, states_length
from carryall.exporter.export import export_model, export_package

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("model_type", "older", "newer"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama", {}, {"rope_parameters": {"rope_type": "default"}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}},
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1, 1, 1, 1],
                    "long_factor": [2, 2, 2, 2],
                }
            },
        ),
        (
            "gemma3_text",
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "layer_types": None,
                "sliding_window_pattern": 2,
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
    ],
)
def test_configurations_of_transformers_4_and_5_mean_the_same(
    model_type: str, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    assert normalised(model_type, **{"rope_parameters": None, **older}) == normalised(model_type, **newer)


def test_heads_default_to_those_of_the_queries() -> None:
    config = normalised("llama", num_key_value_heads=None, head_dim="null")
    assert (config.num_kv_heads, config.head_dim, config.q_size, config.kv_size) == (4, 8, 32, 32)


def test_a_top_level_original_context_overrides_that_of_the_rope() -> None:
    inner = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = rope("llama", rope_parameters=inner, original_max_position_embeddings=64)
    assert config.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", "260"), ("num_hidden_layers", True), ("hidden_size", 1.5)]
)
def test_a_size_that_is_not_an_integer_is_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}' must be an integer in .*, found {value!r}"):
        normalised("llama", **{key: value})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"max_position_embeddings": 4096}, (4096, 4096)),
        ({"n_positions": 1024}, (1024, 1024)),
        ({"text_config": {"max_position_embeddings": 8192}}, (8192, 8192)),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            (131072, 4096),
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, (8192, 2048)),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            (131072, 131072),
        ),
    ],
)
def test_context_lengths(raw: dict[str, Any], expected: tuple[int, int]) -> None:
    assert context_lengths(raw) == expected


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_family_that_states_no_length_has_that_of_its_training(family: str, tmp_path: Path) -> None:
    """transformers 5 writes none for BLOOM; Falcon's first checkpoints have none."""
    checkpoint = write_tiny(family, tmp_path / "checkpoint", dtype=np.float32)
    raw = json.loads((checkpoint / "config.json").read_text())
    for key in LENGTH_KEYS:
        raw.pop(key, None)
    (checkpoint / "config.json").write_text(json.dumps(raw))
    assert states_length(raw)
    package = export_package(checkpoint, tmp_path / "package")
    assert context_lengths(raw) == (2048, 2048)
    assert package.record.context_length == 2048


@pytest.mark.parametrize("family", ["bloom", "gpt_neox", "opt", "gpt2", "falcon"])
def test_a_key_that_the_family_does_not_have_is_ignored(family: str, tmp_path: Path) -> None:
    """As transformers does: an example is num_key_value_heads of families without grouped heads."""
    checkpoint = write_tiny(family, tmp_path / "checkpoint", dtype=np.float32)
    before = ir.to_proto(export_model(checkpoint)).graph.node
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**raw, "num_key_value_heads": 1}))
    after = ir.to_proto(export_model(checkpoint)).graph.node
    assert list(after) == list(before)


STRAY = {"query_pre_attn_scalar": 2.75, "attn_logit_softcapping": 5.25, "final_logit_softcapping": 3.25}
CAPPED = {"final_logit_softcapping"}
HAVE = {
    **{key: set(STRAY) for key in ("gemma2", "gemma3_text")},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "muse_glimmer_text", "nanochat"), CAPPED),
}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_factors_of_scores_that_the_family_does_not_have_are_ignored(family: str) -> None:
    for key, value in STRAY.items():
        changed = normalised(family, **{key: value}) != normalised(family)
        assert changed == (key in HAVE.get(family, ())), key
