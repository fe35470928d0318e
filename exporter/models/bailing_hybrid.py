"""Ling 3: Kimi Delta Attention with bounded decay, latent attention with gates, experts of groups."""

from __future__ import annotations

import dataclasses
from functools import partial

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, StateConfig, integer, number, with_defaults
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from ..layers.kimi_delta import bounded_decay, kimi_delta, kimi_state, softplus_decay
from . import deepseek_v3
from .deepseek_v2 import attention as latent_attention
from .deepseek_v2 import shared_expert
from .kimi_linear import FULL, LINEAR, hybrid_latent, one_name

DEFAULTS: RawConfig = {
    **deepseek_v3.DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "n_routed_experts": 512,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000.0,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "num_mtp_layers": 1,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The last layer of each group has latent attention."""
    raw = with_defaults(one_name(raw), DEFAULTS)
    count, group = integer(raw, "num_hidden_layers"), integer(raw, "layer_group_size")
    types = raw.get("layer_types") or [LINEAR if (i + 1) % group else FULL for i in range(count)]
    heads, size = integer(raw, "num_attention_heads"), integer(raw, "head_dim")
    state = kimi_state(heads, size, integer(raw, "short_conv_kernel_size"))
    lowest = number(raw, "kda_lower_bound") if raw["kda_safe_gate"] else None
    return hybrid_latent(raw, types, dataclasses.replace(state, lowest_decay=lowest), interleaved=True)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c, name = net.config, "model.word_embeddings"
    deepseek_v3.without_speculation(net)
    x = layers.embedding(net, name)
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = layers.pre_norm_layer(net, layer, x, attention=attention, mlp=mlp)
    return layers.lm_head(net, layers.rms_norm(net, "model.norm", x), embedding_name=name)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the layer's attention, of either kind."""
    with net.scope("attention"):
        output = "dense" if net.qualified("dense.weight") in net.checkpoint else "o_proj"
    if net.config.state(layer) is None:
        return latent_attention(net, layer, x, scope="attention", output=output, gate="g_proj")
    with net.scope("attention"):
        return kimi_delta(net, layer, x, decay=_decay, gate=_gate, output=output)


def _decay(net: Decoder, state: StateConfig, x: ir.Value) -> ir.Value:
    rate = layers.linear(net, "f_proj", x, net.config.hidden_size, state.heads * state.key_size)
    if state.lowest_decay is None:
        return softplus_decay(net, state, rate, (state.heads,))
    return bounded_decay(net, state, rate, (state.heads,), state.lowest_decay)


def _gate(net: Decoder, x: ir.Value, width: int) -> ir.Value:
    return layers.linear(net, "g_proj", x, net.config.hidden_size, width)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    route = partial(deepseek_v3.route, correction="expert_bias")
    return sparse_mlp(net, x, experts, route=route, shared=shared_expert)
