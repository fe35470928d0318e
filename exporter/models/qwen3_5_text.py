"""Qwen 3.5, 3.6 and 3.8, text: layers of the gated delta rule, and attention with a gate of its outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    StateConfig,
    decoder_config,
    integer,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.projections import View
from ..layers.recurrent import delta_attention, short_convolution
from ..weights import Array
from .gemma3_text import norm, one_plus

DEFAULTS: RawConfig = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_KINDS = ("linear_attention", "full_attention")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The positions of text are equal in all three parts of the rotary embedding."""
    raw = with_defaults(raw, DEFAULTS)
    interval = integer(raw, "full_attention_interval")
    types = raw.get("layer_types") or [
        _KINDS[(layer + 1) % interval == 0] for layer in range(integer(raw, "num_hidden_layers"))
    ]
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise UnsupportedModelError(
            f"layer type '{unknown[0]}' is not supported; supported: {', '.join(_KINDS)}"
        )
    heads, size = integer(raw, "linear_num_value_heads"), integer(raw, "linear_value_head_dim")
    key_heads, key_size = integer(raw, "linear_num_key_heads"), integer(raw, "linear_key_head_dim")
    state = StateConfig(
        channels=2 * key_heads * key_size + heads * size,
        taps=integer(raw, "linear_conv_kernel_dim"),
        heads=heads,
        key_heads=key_heads,
        key_size=key_size,
        value_size=size,
    )
    rope = rope_config(raw)
    attends = [kind == "full_attention" for kind in types]
    return decoder_config(
        raw,
        ropes=[rope if each else None for each in attends],
        states=[None if each else state for each in attends],
    )


def build(net: Decoder, prefix: str = "model") -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("mtp")  # heads that predict further tokens
    x = layers.embedding(net, f"{prefix}.embed_tokens")
    for layer in range(net.config.num_layers):
        mix = attention if net.config.state(layer) is None else linear_attention
        with net.scope(f"{prefix}.layers.{layer}"):
            x = net.op("Add", x, mix(net, layer, norm(net, "input_layernorm", x)))
            y = layers.gated_mlp(net, layer, norm(net, "post_attention_layernorm", x))
            x = net.op("Add", x, y)
    return layers.lm_head(net, norm(net, f"{prefix}.norm", x), embedding_name=f"{prefix}.embed_tokens")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with norms of heads, times the sigmoid of a gate for each output."""
    c = net.config
    with net.scope("self_attn"):
        stored = (2 * c.q_size, c.hidden_size)
        q, gate = (
            layers.selected_linear(
                net, "q_proj", name, x, stored, _half_of_heads(c.num_heads, half), bias=c.attention_bias
            )
            for half, name in enumerate(("q_proj", "q_gate_proj"))
        )
        k = layers.linear(net, "k_proj", x, c.hidden_size, c.kv_size, bias=c.attention_bias)
        v = layers.linear(net, "v_proj", x, c.hidden_size, c.kv_size, bias=c.attention_bias)
        q = layers.head_norm(net, "q_norm", q, c.num_heads, view=one_plus)
        k = layers.head_norm(net, "k_norm", k, c.num_kv_heads, view=one_plus)
        out = net.op("Mul", layers.attention(net, layer, q, k, v), net.op("Sigmoid", gate))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def linear_attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """A short convolution over queries, keys and values, the gated delta rule, and a norm times a gate."""
    state = net.config.state(layer)
    assert state is not None  # noqa: S101 -- ``build`` has checked
    hidden, keys, values = (
        net.config.hidden_size,
        state.key_heads * state.key_size,
        state.heads * state.value_size,
    )
    with net.scope("linear_attn"):
        x = net.without_padding(x)
        mixed = layers.linear(net, "in_proj_qkv", x, hidden, state.channels)
        mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
        mixed = short_convolution(net, layer, state, "conv1d", mixed, silu=True)
        mixed = net.op("Transpose", mixed, perm=[0, 2, 1])
        q, k, v = net.ops("Split", mixed, net.ints(keys, keys, values), num_outputs=3, axis=-1)
        beta = net.op("Sigmoid", layers.linear(net, "in_proj_b", x, hidden, state.heads))
        rate = layers.linear(net, "in_proj_a", x, hidden, state.heads)
        rate = net.op("Softplus", net.op("Add", rate, net.weight("dt_bias", state.heads)))
        decay = net.op("Mul", rate, net.weight("A_log", state.heads, view=_negative_power, new_name="A"))
        out = delta_attention(net, layer, state, q, k, v, decay, beta)
        gate = layers.linear(net, "in_proj_z", x, hidden, values)
        out = layers.head_norm(net, "norm", out, state.heads, size=state.value_size)
        out = net.op("Mul", out, net.op("Mul", gate, net.op("Sigmoid", gate)))
        return layers.linear(net, "out_proj", out, values, hidden)


def _half_of_heads(heads: int, half: int) -> View:
    """Return a view of one half of the rows of each head."""

    def view(array: Array) -> Array:
        by_head = array.reshape(heads, 2, -1, *array.shape[1:])
        return by_head[:, half].reshape(-1, *array.shape[1:])

    return view


def _negative_power(logarithms: Array) -> Array:
    """Return -exp(A_log), float32: the negative rates of decay."""
    return -np.exp(logarithms.astype(np.float32))
