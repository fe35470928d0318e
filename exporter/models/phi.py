"""Phi 1, 1.5 and 2: parallel attention and feed-forward, LayerNorm, partial rotary embeddings, biases."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    if raw.get("qk_layernorm"):
        raise UnsupportedModelError("Phi with qk_layernorm is not supported")
    return decoder_config({**raw, "rms_norm_eps": raw["layer_norm_eps"]})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    net.checkpoint.ignore("rotary_emb.inv_freq")
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = layers.layer_norm(net, "input_layernorm", x)
            both = net.op("Add", attention(net, layer, y), layers.plain_mlp(net, ("fc1", "fc2"), y))
            x = net.op("Add", x, both)
    x = layers.layer_norm(net, "model.final_layernorm", x)
    return layers.linear(net, "lm_head", x, c.hidden_size, c.vocab_size, bias=True)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=True)
        return layers.linear(
            net, "dense", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size, bias=True
        )
