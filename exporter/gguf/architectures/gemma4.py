"""Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, by_window, stated
from . import gemma2

_NAMES = {
    **gemma2.NAMES,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
}
_KEYS = {
    "attention.key_length_swa": "head_dim_of_windows",
    "attention.value_length_swa": "value_dim_of_windows",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window_pattern": "windows",
    "attention.value_length": "value_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "rope.dimension_count_swa": "rotary_of_windows",
    "rope.freq_base_swa": "rope_theta_of_windows",
}


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers and their heads, and how many of a head's pairs rotate in full layers.

    Raises:
        UnsupportedModelError: the rope is scaled.
    """
    if config.get("rope_scaling", {}).get("factor", 1.0) not in (0, 1):
        raise UnsupportedModelError("the GGUF file has a Gemma 4 with a scaled rope, which is not supported")
    count, heads = stated(config, "num_hidden_layers"), stated(config, "num_key_value_heads")
    types = by_window(stated(config, "windows"), count)
    full = types.index("full_attention") if "full_attention" in types else count - 1
    local = types.index("sliding_attention") if "sliding_attention" in types else 0
    by_layer = heads if isinstance(heads, list) else [heads] * count
    widths = stated(config, "intermediate_size")
    widths = widths if isinstance(widths, list) else [widths]
    factors = config.get("rope_factors", {}).get("long_factor")
    embeddings = tensors.get("model.embed_tokens_per_layer.weight")
    ropes: dict[str, Any] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": stated(config, "rope_theta_of_windows")},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 1.0 if factors is None else factors.count(1.0) / len(factors),
            "rope_theta": config["rope_theta"],
        },
    }
    return {
        "layer_types": types,
        "head_dim": stated(config, "head_dim_of_windows"),
        "global_head_dim": stated(config, "head_dim"),
        "num_key_value_heads": by_layer[local],
        "num_global_key_value_heads": by_layer[full],
        "attention_k_eq_v": f"model.layers.{full}.self_attn.v_proj.weight" not in tensors,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) == 2 * min(widths),
        "vocab_size_per_layer_input": config["vocab_size"] if embeddings is None else embeddings.shape[0],
        "rope_parameters": ropes,
        "rope_scaling": None,
        "rope_factors": None,
        "enable_moe_block": bool(config.get("num_experts")),
        "top_k_experts": config.get("num_experts_per_tok"),
        "partial_rotary_factor": None,
    }


NAME = "gemma4"
ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    inner=_NAMES,
    outer={
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    parameters={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    experts="experts",
    own_factors=True,
    own_heads=True,
    keys=_KEYS,
    adapt=_adapt,
)
