"""Kimi Linear: Kimi Delta Attention, latent attention without rotation, and experts of DeepSeek-V3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    StateConfig,
    integer,
    mapping,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from ..layers.kimi_delta import kimi_delta, kimi_state, softplus_decay
from ..layers.recurrent import check_activation
from . import deepseek_v3
from .deepseek_v2 import attention, latent_config

FULL, LINEAR = "full_attention", "linear_attention"
# The names of its own files, and those of transformers' other models for the same.
NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
DEFAULTS: RawConfig = {
    **deepseek_v3.DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
_LINEAR_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Sizes and kinds of layers may be in ``linear_attn_config``, counted from 1."""
    if raw.get("mla_use_nope") is False:
        raise UnsupportedModelError("kimi_linear with mla_use_nope false, a rotation, is not supported")
    linear = mapping(raw, "linear_attn_config") if raw.get("linear_attn_config") else {}
    sizes = {name: linear[key] for key, name in _LINEAR_NAMES.items() if key in linear}
    raw = with_defaults({**one_name(raw), **sizes}, DEFAULTS)
    count = integer(raw, "num_hidden_layers")
    types = _stated_types(linear, count) or raw.get("layer_types")
    types = types or [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    heads, size = integer(raw, "linear_num_heads"), integer(raw, "linear_head_dim")
    state = kimi_state(heads, size, integer(raw, "linear_conv_kernel_dim"))
    normalised = hybrid_latent(raw, types, state, interleaved=False)
    return dataclasses.replace(
        normalised,
        ropes=(None,) * count,
        experts=tuple(
            each and dataclasses.replace(each, scope="block_sparse_moe", names=("w1", "w3", "w2"))
            for each in normalised.experts
        ),
    )


def one_name(raw: RawConfig) -> RawConfig:
    """Return config.json with one name for each field.

    Raises:
        UnsupportedModelError: it has two names with different values.
    """
    renamed = {name: value for name, value in raw.items() if name not in NAMES}
    for name, usual in NAMES.items():
        if name not in raw:
            continue
        if raw.get(usual) not in (None, raw[name]):
            raise UnsupportedModelError(f"config.json: '{name}' and '{usual}' are one field with two values")
        renamed[usual] = raw[name]
    return renamed


def hybrid_latent(
    raw: RawConfig, types: list[str], state: StateConfig, *, interleaved: bool
) -> DecoderConfig:
    """Return the configuration of layers with a state and of layers with latent attention, with experts."""
    check_activation("hidden_act", raw.get("hidden_act", "silu"))
    count = integer(raw, "num_hidden_layers")
    if len(types) != count or set(types) - {FULL, LINEAR}:
        raise CheckpointError(
            f"config.json: layer_types must be {count} of {FULL} and {LINEAR}, found {types}"
        )
    kinds = raw.get("mlp_layer_types") or [
        "dense" if layer < integer(raw, "first_k_dense_replace") else "sparse" for layer in range(count)
    ]
    normalised = latent_config(
        {"q_lora_rank": None, **raw, "first_k_dense_replace": 0}, interleaved=interleaved
    )
    experts = normalised.experts[0]
    return dataclasses.replace(
        normalised,
        experts=tuple(None if kind == "dense" else experts for kind in kinds),
        states=tuple(state if kind == LINEAR else None for kind in types),
        unused_layers=integer(raw, "num_mtp_layers", 0),
    )


def _stated_types(linear: Mapping[str, object], count: int) -> list[str] | None:
    full, delta = linear.get("full_attn_layers"), linear.get("kda_layers")
    if not isinstance(full, list) or not isinstance(delta, list):
        return None
    if sorted([*full, *delta]) != list(range(1, count + 1)):
        raise CheckpointError(
            f"config.json: full_attn_layers and kda_layers must name each of {count} layers once, from 1 on"
        )
    return [FULL if layer + 1 in full else LINEAR for layer in range(count)]


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    deepseek_v3.without_speculation(net)
    return layers.pre_norm_decoder(net, attention=mixer, mlp=mlp)


def mixer(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the layer's attention, of either kind."""
    if net.config.state(layer) is None:
        return attention(net, layer, x)
    with net.scope("self_attn"):
        return kimi_delta(net, layer, x, decay=_decay, gate=_gate)


def _decay(net: Decoder, state: StateConfig, x: ir.Value) -> ir.Value:
    rate = _through(net, ("f_a_proj", "f_b_proj"), x, state.key_size, state.heads * state.key_size)
    return softplus_decay(net, state, rate, (1, 1, state.heads, 1))


def _gate(net: Decoder, x: ir.Value, width: int) -> ir.Value:
    state = next(each for each in net.config.states if each is not None)
    return _through(net, ("g_a_proj", "g_b_proj"), x, state.value_size, width)


def _through(net: Decoder, names: tuple[str, str], x: ir.Value, rank: int, width: int) -> ir.Value:
    """Return x through two projections, the first of ``rank`` outputs."""
    x = layers.linear(net, names[0], x, net.config.hidden_size, rank)
    return layers.linear(net, names[1], x, rank, width)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    return sparse_mlp(net, x, experts, route=deepseek_v3.route, shared=_shared)


def _shared(net: Decoder, x: ir.Value, experts: ExpertsConfig) -> ir.Value:
    with net.scope("shared_experts"):
        return layers.gated_linear_unit(net, x, ("gate_proj", "up_proj", "down_proj"), experts.shared)
