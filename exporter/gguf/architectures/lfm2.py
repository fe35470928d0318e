"""LFM2: short convolutions between layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, in_channels, stated

NAMES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


def adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the layers' kinds: convolutions have no heads of keys."""
    heads = stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * stated(config, "num_hidden_layers")
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and (not isinstance(context, int) or window < context):
        raise UnsupportedModelError(
            f"the GGUF file has lfm2.attention.sliding_window = {window}, and lfm2 has no windows here"
        )
    return {
        "num_key_value_heads": [number for number in heads if number],
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


NAME = "lfm2"
ARCHITECTURE = Architecture(
    model_type="lfm2",
    inner=NAMES,
    outer={"token_embd_norm": "model.embedding_norm"},
    shapes={"conv.conv.weight": in_channels},
    keys={"shortconv.l_cache": "conv_L_cache"},
    adapt=adapt,
)
