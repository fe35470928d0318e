"""Mellum 2: Qwen 3 with experts, sliding windows, and a rotary embedding of each kind of layer."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    ropes_of_types,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import mlp
from .qwen2_moe import experts
from .qwen3 import attention

DEFAULTS: RawConfig = {
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "decoder_sparse_step": 1,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    count = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or ["full_attention"] * count
    kinds = raw.get("mlp_layer_types") or ["sparse"] * count
    dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
    return decoder_config(
        raw,
        windows=layer_windows(types, raw["sliding_window"]),
        ropes=ropes_of_types(raw, types),
        experts=experts({**raw, "mlp_only_layers": dense}),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("mtp")  # layers that predict further tokens
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)
