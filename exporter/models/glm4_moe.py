"""GLM 4.5 to 4.7: experts of DeepSeek-V3, attention of groups with a partial rotary embedding."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder
from .deepseek_v2 import grouped_experts
from .deepseek_v3 import mlp, nextn_head, without_speculation

DEFAULTS: RawConfig = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    dense, sparse = integer(raw, "first_k_dense_replace"), grouped_experts(raw)
    experts = [None if layer < dense else sparse for layer in range(integer(raw, "num_hidden_layers"))]
    return dataclasses.replace(
        decoder_config(raw, experts=experts),
        unused_layers=integer(raw, "num_nextn_predict_layers"),
        head_norms=bool(raw["use_qk_norm"]),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    without_speculation(net)
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def draft_head(net: Decoder) -> ir.Value:
    """Write the layer for speculation, and return its logits."""
    return nextn_head(net, attention)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention, with RMSNorm of each query and key head in the larger models."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        if c.head_norms:
            q = layers.head_norm(net, "q_norm", q, c.num_heads)
            k = layers.head_norm(net, "k_norm", k, c.num_kv_heads)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)
