"""Granite 4: layers of Mamba-2 or of attention, experts beside a feed-forward layer of all tokens."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, integer, rope_config, with_defaults
from ..decoder import Decoder
from ..layers.experts import SoftmaxRoute, StackedForm, sparse_mlp, stacked_expert
from ..layers.mamba import mamba, mamba_config
from . import granite
from .llama import attention

DEFAULTS: RawConfig = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")
# The softmax over the selected experts' scores is that over all, scaled to a sum of 1.
ROUTE = SoftmaxRoute("router.layer")
_STACKS = ("input_linear.weight", "output_linear.weight")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    count = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or raw.get("layers_block_type") or [_MAMBA[0]] * count
    unknown = sorted(set(types) - {*_MAMBA, *_ATTENTION})
    if unknown:
        raise UnsupportedModelError(
            f"layer type '{unknown[0]}' is not supported; supported: {', '.join((*_MAMBA, *_ATTENTION))}"
        )
    rotary = rope_config(raw) if raw.get("position_embedding_type") == "rope" else None
    state = mamba_config(raw) if set(types) & set(_MAMBA) else None
    return dataclasses.replace(
        granite.config(raw),
        mlp_widths=(integer(raw, "shared_intermediate_size"),) * count,
        ropes=tuple(rotary if kind in _ATTENTION else None for kind in types),
        states=tuple(state if kind in _MAMBA else None for kind in types) if state else (),
        experts=(experts(raw),) * count,
    )


def experts(raw: RawConfig) -> ExpertsConfig | None:
    """Return the mixture of experts of every layer; None if there are none."""
    if not integer(raw, "num_local_experts"):
        return None
    return ExpertsConfig(
        scope="block_sparse_moe",
        count=integer(raw, "num_local_experts"),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "intermediate_size"),
        normalize=True,
        names=("gate_proj", "up_proj", "down_proj"),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return granite.build(net, mix=mix, feed=feed_forward)


def mix(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the attention or the Mamba-2 of the layer."""
    if net.config.has_attention(layer):
        return attention(net, layer, x)
    with net.scope("mamba"):
        return mamba(net, layer, x)


def feed_forward(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the sum of the feed-forward layer of all tokens, if there is one, and of the experts."""
    mixture, width = net.config.experts[layer], net.config.mlp_width(layer)
    shared = None
    if width:
        with net.scope("shared_mlp"):
            parts = {"gate_proj": width, "up_proj": width}
            gate, up = layers.split_linear(net, "input_linear", parts, x, net.config.hidden_size)
            shared = net.op("Mul", layers.activation(net, gate), up)
            shared = layers.linear(net, "output_linear", shared, width, net.config.hidden_size)
    if mixture is None:
        if shared is None:
            raise UnsupportedModelError("config.json has neither experts nor 'shared_intermediate_size'")
        return shared
    mixed = sparse_mlp(net, x, mixture, route=ROUTE, expert=expert, stacked=StackedForm(module=""))
    return mixed if shared is None else net.op("Add", mixed, shared)


def expert(net: Decoder, x: ir.Value, index: int, experts: ExpertsConfig) -> ir.Value:
    """Write expert ``index`` for x [n, hidden]."""
    return stacked_expert(net, x, index, experts, _STACKS)
