"""Options of families that would change the results and are not supported are refused by name."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import normalised
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, tiny_config, write_tiny

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.config import context_lengths
from carryall.exporter.config_checks import check_options
from carryall.exporter.export import export_model
from carryall.exporter.family import normalised_config


@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        ("qwen3_5_text", {"hidden_act": "gelu"}),
        ("granitemoehybrid", {"hidden_act": "gelu"}),
        ("falcon_h1", {"hidden_act": "gelu"}),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"num_experts_per_tok": 2}),
        ("phimoe", {"num_experts_per_tok": 3}),
        ("phimoe", {"sliding_window": 8}),
        ("phimoe", {"long_mscale": 2.0}),
        ("muse_glimmer_text", {"layer_rope_theta": [0, 20000.0, 0, 0, 0]}),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}),
        ("olmoe", {"clip_qkv": 3.0}),
    ],
)
def test_it_is_named(model_type: str, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(next(iter(option)))):
        normalised(model_type, **_in_place(model_type, option))


def test_kimi_linears_own_names_of_fields() -> None:
    stated = {"model_max_length": 64, "max_position_embeddings": None}
    assert normalised("kimi_linear", **stated).max_position_embeddings == 64
    assert context_lengths(tiny_config("kimi_linear", **stated)) == (64, 64)
    experts = normalised("kimi_linear", num_experts_per_token=None, num_experts_per_tok=2).experts[1]
    assert experts is not None
    assert experts.per_token == 2


def _in_place(model_type: str, option: dict[str, Any]) -> dict[str, Any]:
    """Return the option where the family reads it."""
    if "long_mscale" not in option:
        return option
    ropes = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "short_mscale": 1.0,
    }
    return {"rope_parameters": {**ropes, **option}}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_model_that_sees_later_tokens_is_no_decoder(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="'is_causal' false"):
        check_options({"model_type": model_type, "is_causal": False})


@pytest.mark.parametrize(
    ("model_type", "value"),
    [("gemma", True), ("gemma2", True), ("gemma3_text", True), ("gemma4_text", "all")],
)
def test_an_encoder_of_a_decoder_family_is_named(model_type: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        check_options({"model_type": model_type, "use_bidirectional_attention": value})
    text = {"model_type": model_type, "use_bidirectional_attention": value}
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        check_options({"model_type": "gemma3", "text_config": text})
    check_options({"model_type": model_type, "use_bidirectional_attention": "vision"})


@pytest.mark.parametrize(
    "option",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
    ],
)
def test_a_part_of_a_head_turns_only_in_families_that_have_it(option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'partial_rotary_factor' 0\.5 is not supported"):
        check_options({"model_type": "llama", **option})
    check_options({"model_type": "phi3", **option})


@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        ("gpt2", {"num_attention_heads": 8}),
        ("gpt2", {"hidden_size": 64}),
        ("lfm3", {"rms_norm_eps": 0.1}),
        ("lfm3", {"norm_eps": None, "rms_norm_eps": 0.1}),
        ("deepseek_v3", {"head_dim": 2}),
        ("youtu", {"head_dim": 2}),
        ("gpt_neox", {"head_dim": 16}),
    ],
)
def test_a_second_name_of_a_field_with_another_value_is_named(
    model_type: str, option: dict[str, Any]
) -> None:
    """transformers takes the second name's value, and turns as much of a head as ``head_dim`` says."""
    config = tiny_config(model_type, **option)
    with pytest.raises(UnsupportedModelError, match=re.escape(list(option)[-1])):
        read(config)


def read(config: dict[str, Any]) -> object:
    check_options(config)
    return normalised_config(config)


def test_a_second_name_with_the_same_value_is_no_option() -> None:
    check_options(tiny_config("gpt2", num_attention_heads=4, hidden_size=32))
    read(tiny_config("gpt_neox", head_dim=8))


def test_a_soft_cap_may_be_an_integer(tmp_path: Path) -> None:
    model = export_model(write_tiny("gemma2", tmp_path, attn_logit_softcapping=50))
    (softcap,) = {node.attributes["softcap"].value for node in model.graph if "softcap" in node.attributes}
    assert isinstance(softcap, float)


def test_a_part_of_a_head_that_is_the_whole_is_no_option() -> None:
    check_options({"model_type": "llama", "partial_rotary_factor": 1.0, "rope_scaling": None})
    check_options(
        {
            "model_type": "gemma4_text",
            "rope_parameters": {"x": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
        }
    )


@pytest.mark.parametrize("model_type", ["nanochat", "mistral", "qwen3", "olmoe"])
def test_a_bias_of_a_projection_is_not_left_out(model_type: str, tmp_path: Path) -> None:
    """transformers reads it for ``attention_bias``, which these families do not all have."""
    file = write_tiny(model_type, tmp_path) / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith("o_proj.weight"))
    bias = f"{name.removesuffix('weight')}bias"
    save_file({**weights, bias: np.ones(weights[name].shape[0], np.float32)}, file)
    with pytest.raises(UnsupportedModelError, match=f"the bias '{bias}'"):
        export_model(tmp_path)


def test_groups_must_have_the_experts_of_a_token() -> None:
    raw = CONFIGS["glm4_moe"] | {
        "model_type": "glm4_moe",
        "n_group": 2,
        "topk_group": 1,
        "n_routed_experts": 4,
    }
    with pytest.raises(CheckpointError, match="routed to 3 experts, and its groups have 2"):
        normalised_config(raw | {"num_experts_per_tok": 3})


def test_the_norms_of_nanochat_undo_the_factor_of_yarn() -> None:
    """transformers norms queries and keys behind the rotation; the factor is 1.14 without them."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    ropes = normalised("nanochat", rope_parameters=yarn).ropes
    assert {rope.attention_factor for rope in ropes if rope is not None} == {1.0}


def test_lfm2_has_silu_whatever_is_stated() -> None:
    assert normalised("lfm2", hidden_act="relu").hidden_act == "silu"


def test_a_convolution_of_one_tap_has_no_state() -> None:
    with pytest.raises(CheckpointError, match=r"taps of the short convolution.* found 1"):
        normalised_config(CONFIGS["lfm2"] | {"model_type": "lfm2", "conv_L_cache": 1})


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bloom"])
def test_keys_that_transformers_ignores_are_ignored(model_type: str) -> None:
    assert normalised(model_type, head_dim=16, num_key_value_heads=1) == normalised(model_type)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gate_proj", "g_proj"])
def test_gates_of_lfm3_are_found_by_both_names(name: str, tmp_path: Path) -> None:
    file = write_tiny("lfm3", tmp_path) / "model.safetensors"
    weights = {
        key.replace("self_attn.gate_proj", f"self_attn.{name}"): value
        for key, value in load_file(file).items()
    }
    save_file(weights, file)
    initializers = export_model(tmp_path).graph.initializers
    assert any(f".self_attn.{name}." in key for key in initializers)


def test_the_head_of_nemotron_h_is_never_the_embedding() -> None:
    """transformers reads ``tie_word_embeddings`` and ties nothing."""
    assert not normalised("nemotron_h", tie_word_embeddings=True).tie_word_embeddings


def test_a_hybrid_without_attention_has_no_axes_of_a_rotation() -> None:
    config = copy.deepcopy(tiny_config("qwen3_5_moe"))
    config["text_config"] |= {"layer_types": None, "full_attention_interval": 99}
    read = normalised_config(config)
    assert not any(read.ropes)
    assert read.rope_axes == ()
