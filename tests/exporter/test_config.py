from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny_config

from carryall.errors import CheckpointError
from carryall.exporter.config import DecoderConfig, RopeConfig, context_lengths
from carryall.exporter.export import family


def normalised(model_type: str, **overrides: Any) -> DecoderConfig:
    return family(model_type).config(tiny_config(model_type, **overrides))


def rope(model_type: str, layer: int = 0, **overrides: Any) -> RopeConfig:
    config = normalised(model_type, **overrides).ropes[layer]
    assert config is not None
    return config


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


def test_gemma3_has_a_rope_for_each_kind_of_layer() -> None:
    local, full = rope("gemma3_text", 0), rope("gemma3_text", 1)
    assert (local.theta, full.theta) == (1e4, 1e6)
    assert normalised("gemma3_text").windows == (5, None, 5)


def test_a_gemma3_that_names_only_its_sizes_gets_the_defaults_of_the_family() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    config = family("gemma3").config(
        {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}
    )
    assert config.windows == (1024,) * 5 + (None,)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (256, 8, 4)
    assert config.attention_scale == 256**-0.5
    assert config.tie_word_embeddings


def test_smollm3_without_lists_drops_every_fourth_rope() -> None:
    ropes = normalised("smollm3", no_rope_layers=None, num_hidden_layers=8).ropes
    assert [rope is None for rope in ropes] == [False, False, False, True] * 2


def test_a_mistral_window_of_null_is_none_and_a_missing_one_4096() -> None:
    assert normalised("mistral", sliding_window="null").windows == (None, None)
    assert normalised("mistral", sliding_window=None).windows == (4096, 4096)


def test_qwen2_has_no_window_unless_switched_on() -> None:
    assert normalised("qwen2", sliding_window=4, max_window_layers=0).windows == (None, None)
    assert normalised("qwen2", sliding_window=4, max_window_layers=1, use_sliding_window=True).windows == (
        None,
        4,
    )
    explicit = ["sliding_attention", "full_attention"]
    assert normalised("qwen2", sliding_window=4, layer_types=explicit, use_sliding_window=True).windows == (
        4,
        None,
    )


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
