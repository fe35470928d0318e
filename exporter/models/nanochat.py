"""nanochat: norms without weights, a norm of the embeddings, and a rotary embedding that turns backwards."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, rope_config, with_defaults
from ..decoder import Decoder
from ..layers.projections import View
from ..weights import Array

DEFAULTS: RawConfig = {
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "final_logit_softcapping": 15.0,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A ``final_logit_softcapping`` of null means none."""
    uncapped = "final_logit_softcapping" in raw and raw["final_logit_softcapping"] is None
    raw = with_defaults(raw, DEFAULTS)
    rope = dataclasses.replace(rope_config(raw), attention_factor=1.0)  # the norms behind undo any other
    return decoder_config(
        raw,
        scores=() if uncapped else ("final_logit_softcapping",),
        ropes=[rope] * integer(raw, "num_hidden_layers"),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    x = norm(net, layers.embedding(net, "model.embed_tokens"))
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, attention(net, layer, norm(net, x)))
            x = net.op("Add", x, layers.plain_mlp(net, ("fc1", "fc2"), norm(net, x), bias=False))
    return layers.lm_head(net, norm(net, x), embedding_name="model.embed_tokens")


def norm(net: Decoder, x: ir.Value) -> ir.Value:
    """RMSNorm without a weight."""
    return layers.plain_rms_norm(net, x, net.config.hidden_size)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with RMSNorm of each query and key head.

    A norm without a weight may stand in front of the rotation. Halves that are exchanged turn backwards.
    """
    c = net.config
    with net.scope("self_attn"):
        q, k = (
            _normed(net, layers.selected_linear(net, name, name, x, shape, _exchanged(heads)), heads)
            for name, heads, shape in (
                ("q_proj", c.num_heads, (c.q_size, c.hidden_size)),
                ("k_proj", c.num_kv_heads, (c.kv_size, c.hidden_size)),
            )
        )
        v = layers.linear(net, "v_proj", x, c.hidden_size, c.kv_size)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)


def _normed(net: Decoder, x: ir.Value, heads: int) -> ir.Value:
    size = net.config.head_dim
    x = layers.plain_rms_norm(net, net.op("Reshape", x, net.ints(0, 0, heads, size)), size)
    return net.op("Reshape", x, net.ints(0, 0, heads * size))


def _exchanged(heads: int) -> View:
    def view(array: Array) -> Array:
        by_half = array.reshape(heads, 2, -1, *array.shape[1:])
        return np.flip(by_half, 1).reshape(array.shape)

    return view
