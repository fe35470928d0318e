"""LFM3: LFM2 with norms behind its parts, sliding windows, and gates of attention's heads."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, integer, ropes_of_types, with_defaults
from ..decoder import Decoder
from . import lfm2
from .lfm2 import feed_forward, gated_convolution

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULTS: RawConfig = {
    **lfm2.DEFAULTS,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "attention_bias": False,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    },
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The width of feed-forward layers is the stated one."""
    raw = {**with_defaults(raw, DEFAULTS), "block_auto_adjust_ff_dim": False}
    types = raw.get("layer_types") or [
        FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer else "conv"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    plain = [FULL if kind == SLIDING else kind for kind in types]
    one_rope = {key: value for key, value in raw.items() if key != "rope_parameters"}
    return dataclasses.replace(
        lfm2.hybrid_config({**one_rope, "layer_types": plain}),
        ropes=tuple(ropes_of_types(raw, types, without=("conv",))),
        windows=tuple(raw["sliding_window"] if kind == SLIDING else None for kind in types),
        norms_behind=bool(raw["use_sandwich_norm"]),
        head_gates=bool(raw["use_attention_gate"]),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        mix = attention if net.config.has_attention(layer) else gated_convolution
        with net.scope(f"model.layers.{layer}"):
            y = mix(net, layer, layers.rms_norm(net, "operator_norm", x))
            x = net.op("Add", x, _norm_behind(net, "post_operator_norm", y))
            y = feed_forward(net, layer, layers.rms_norm(net, "ffn_norm", x))
            x = net.op("Add", x, _norm_behind(net, "post_ffn_norm", y))
    x = layers.rms_norm(net, "model.embedding_norm", x)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")


def _norm_behind(net: Decoder, name: str, x: ir.Value) -> ir.Value:
    return layers.rms_norm(net, name, x) if net.config.norms_behind else x


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with norms of heads, times the sigmoid of a gate for each head."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        q = layers.head_norm(net, "q_norm", q, c.num_heads)
        k = layers.head_norm(net, "k_norm", k, c.num_kv_heads)
        out = layers.attention(net, layer, q, k, v)
        if c.head_gates:
            # Files have the first name; transformers renames it as it reads them, and takes both.
            name = "g_proj" if f"{net.qualified('g_proj')}.weight" in net.checkpoint else "gate_proj"
            gate = net.op("Sigmoid", layers.linear(net, name, x, c.hidden_size, c.num_heads))
            heads = net.op("Reshape", out, net.ints(0, 0, c.num_heads, c.head_dim))
            heads = net.op("Mul", heads, net.op("Unsqueeze", gate, net.ints(-1)))
            out = net.op("Reshape", heads, net.ints(0, 0, c.q_size))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
