"""Public reports of ropes that were read wrongly: angles and factors are those of the models' authors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_config

from carryall.exporter.config.types import RopeConfig
from carryall.exporter.family import normalised_config
from carryall.exporter.rope import attention_scaling, linear_frequencies

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
FACTOR = 0.1 * math.log(16) + 1


def ropes(model_type: str, **overrides: Any) -> list[RopeConfig]:
    config = tiny_config(model_type, **{"rope_parameters": None, **overrides})
    found = [rope for rope in normalised_config(config).ropes if rope is not None]
    assert found, "no layer rotates"
    return found


@pytest.mark.parametrize(
    ("source", "model_type", "rope", "factor"),
    [
        # mscale and mscale_all_dim were ignored, so that every score was 1.6 times too large.
        (
            "vllm-project/vllm#48623",
            "ministral3",
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            1.0,
        ),
        # Without them, the usual factor was left out.
        ("ggml-org/llama.cpp#17945", "ministral3", {**YARN, "llama_4_scaling_beta": 0.1}, FACTOR),
        ("ggml-org/llama.cpp#17945", "deepseek_v3", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        # An explicit factor was ignored.
        ("ml-explore/mlx-lm#1507", "qwen3", {**YARN, "attention_factor": 1.0}, 1.0),
        ("ml-explore/mlx-lm#1507", "qwen3", YARN, FACTOR),
    ],
)
def test_the_factor_of_yarn(source: str, model_type: str, rope: dict[str, Any], factor: float) -> None:
    for read in ropes(model_type, rope_parameters=rope, rope_scaling=None):
        assert attention_scaling(read) == pytest.approx(factor, rel=1e-6), source


@pytest.mark.parametrize("source", ["ggml-org/llama.cpp#14367", "antonellof/ferrox#39"])
def test_layers_with_windows_of_gemma3_are_not_scaled(source: str) -> None:
    parts = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    scaling = {"rope_type": "linear", "factor": 8.0}
    local, full = ropes("gemma3_text", **parts, rope_scaling=scaling)
    assert (local.rope_type, full.rope_type, full.factor) == ("default", "linear", 8.0), source


def test_layers_with_windows_of_gemma3_have_their_own_base() -> None:
    """huggingface/candle#2891: all layers had the base of the others."""
    parts = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    local, full = ropes("gemma3_text", **parts, rope_theta=1e6, rope_local_base_freq=1e4)
    assert (local.theta, full.theta) == (1e4, 1e6)


def test_a_linear_factor_divides_all_frequencies() -> None:
    """floneum/kalosm#340: the scaling of the configuration was not read."""
    (plain, *_), (scaled, *_) = (
        ropes("llama", rope_scaling=scaling) for scaling in (None, {"rope_type": "linear", "factor": 4.0})
    )
    np.testing.assert_allclose(linear_frequencies(scaled) * 4, linear_frequencies_of(plain), rtol=1e-12)


def linear_frequencies_of(rope: RopeConfig) -> np.ndarray[Any, np.dtype[np.float64]]:
    return rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
