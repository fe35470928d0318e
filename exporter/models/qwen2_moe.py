"""Qwen 1.5 and 2 with a sparse mixture of experts and a shared expert."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import mlp

DEFAULTS: RawConfig = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "qkv_bias": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``qkv_bias`` becomes ``attention_bias``."""
    raw = with_defaults(raw, DEFAULTS)
    return decoder_config(
        {**raw, "attention_bias": raw["qkv_bias"]},
        windows=layer_windows(_layer_types(raw), integer(raw, "sliding_window", 4096)),
        experts=experts(raw),
    )


def experts(raw: RawConfig) -> list[ExpertsConfig | None]:
    """Return each layer's mixture of experts, None for a dense feed-forward layer."""
    # transformers 5 may write num_experts as num_local_experts.
    count = integer(raw, "num_local_experts", integer(raw, "num_experts"))
    sparse = ExpertsConfig(
        scope="mlp",
        count=count,
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
        names=("gate_proj", "up_proj", "down_proj"),
        shared=integer(raw, "shared_expert_intermediate_size", 0),
    )
    dense, step = raw["mlp_only_layers"], integer(raw, "decoder_sparse_step")
    return [
        sparse if count and layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(integer(raw, "num_hidden_layers"))
    ]


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=net.config.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, net.config.q_size, net.config.hidden_size)


def _layer_types(raw: RawConfig) -> Sequence[str]:
    """Return ``layer_types``, by default those of transformers: even layers below max_window_layers slide."""
    if raw.get("layer_types"):
        types: Sequence[str] = raw["layer_types"]
        return types
    lower = integer(raw, "max_window_layers", 28) if raw.get("use_sliding_window") else 0
    return [
        "sliding_attention" if layer < lower and layer % 2 == 0 else "full_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
