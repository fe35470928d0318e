"""Gemma 4, text: two kinds of heads, layers that share keys and values, embeddings of each layer, experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    KeyValueConfig,
    LayerInputConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    mapping,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import StackedForm, sparse_mlp, stacked_expert

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULTS: RawConfig = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_PATTERN = 6  # without ``layer_types``, the last of so many layers is global
_BY_LAYER = ("head_dim", "num_key_value_heads")  # what ``per_layer_config`` may change


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    types = _layer_types(raw)
    key_values = _key_values(raw, types)
    normalised = decoder_config(
        {**raw, "hidden_act": raw["hidden_activation"]},
        scores=("final_logit_softcapping",),
        windows=layer_windows(types, raw["sliding_window"]),
        ropes=[
            rope_config({**raw, "head_dim": key_value.size}, mapping(raw["rope_parameters"], kind))
            for kind, key_value in zip(types, key_values, strict=True)
        ],
        experts=[_experts(raw)] * len(types),
    )
    width, doubled = integer(raw, "intermediate_size"), bool(raw.get("use_double_wide_mlp"))
    return dataclasses.replace(
        normalised,
        attention_scale=1.0,
        key_values=tuple(key_values),
        mlp_widths=tuple(
            width * 2 if doubled and key_value.owner != layer else width
            for layer, key_value in enumerate(key_values)
        ),
        layer_input=_layer_input(raw),
    )


def _layer_types(raw: RawConfig) -> Sequence[str]:
    """Return the kind of each layer; the last one is always global."""
    count = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or [SLIDING if (layer + 1) % _PATTERN else FULL for layer in range(count)]
    if not isinstance(types, list) or len(types) != count or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"config.json: layer_types must name {count} layers, found {types!r}")
    return [*types[:-1], FULL]


def _key_values(raw: RawConfig, types: Sequence[str]) -> list[KeyValueConfig]:
    """Return the keys and values of each layer.

    The last ``num_kv_shared_layers`` layers read those of the last layer of their kind in front of them.
    """
    shared = integer(raw, "num_kv_shared_layers")
    owners = len(types) - shared
    if owners < 1:
        raise CheckpointError(f"config.json: num_kv_shared_layers {shared} must be below {len(types)} layers")
    key_values: list[KeyValueConfig] = []
    for layer, kind in enumerate(types):
        if layer < owners:
            key_values.append(_own_key_values(raw, layer, kind))
            continue
        owner = max((i for i in range(owners) if types[i] == kind), default=None)
        if owner is None:
            raise CheckpointError(
                f"config.json: layer {layer} shares keys and values (num_kv_shared_layers), but none of the "
                f"first {owners} layers has the kind {kind}"
            )
        key_values.append(key_values[owner])
    return key_values


def _own_key_values(raw: RawConfig, layer: int, kind: str) -> KeyValueConfig:
    """Return the sizes of a layer: those of its kind, or of ``per_layer_config`` of transformers 5."""
    one_projection = kind == FULL and bool(raw.get("attention_k_eq_v"))
    settings: dict[str, Any] = {}
    if raw.get("per_layer_config") is not None:
        settings = dict(mapping(mapping(raw, "per_layer_config"), str(layer)))
    elif kind == FULL:
        settings = {"head_dim": raw["global_head_dim"]}
        if one_projection and raw.get("num_global_key_value_heads"):
            settings["num_key_value_heads"] = raw["num_global_key_value_heads"]
    unknown = set(settings) - set(_BY_LAYER)
    if unknown:
        raise UnsupportedModelError(f"per_layer_config with '{min(unknown)}' is not supported")
    sizes = {**raw, **settings}
    return KeyValueConfig(
        heads=integer(sizes, "num_key_value_heads"),
        size=integer(sizes, "head_dim"),
        owner=layer,
        one_projection=one_projection,
    )


def _layer_input(raw: RawConfig) -> LayerInputConfig | None:
    width, rows = integer(raw, "hidden_size_per_layer_input"), integer(raw, "vocab_size_per_layer_input")
    if not width:
        return None
    if rows < integer(raw, "vocab_size"):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input {rows} is below vocab_size {raw['vocab_size']}: some tokens would "
            "have no embedding"
        )
    return LayerInputConfig(vocab_size=rows, width=width)


def _experts(raw: RawConfig) -> ExpertsConfig | None:
    if not raw.get("enable_moe_block"):
        return None
    return ExpertsConfig(
        scope="experts",
        count=integer(raw, "num_experts"),
        per_token=integer(raw, "top_k_experts"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=True,
        names=("gate_proj", "up_proj", "down_proj"),
    )


def build(net: Decoder, prefix: str = "model", head_name: str = "lm_head") -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    embedding_name = f"{prefix}.embed_tokens"
    x = layers.embedding(net, embedding_name)
    with net.scope(embedding_name):
        x = net.scaled_embedding(layers.scaled(net, x, math.sqrt(c.hidden_size)))
    inputs = layer_inputs(net, prefix, x)
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            y = attention(net, layer, layers.rms_norm(net, "input_layernorm", x))
            x = behind_attention(net, layer, x, y)
            if c.layer_input is not None:
                x = net.op("Add", x, gated_input(net, x, inputs[layer], c.layer_input.width))
            x = net.op("Mul", x, net.weight("layer_scalar", 1))
    x = layers.rms_norm(net, f"{prefix}.norm", x)
    return layers.lm_head(net, x, embedding_name=embedding_name, head_name=head_name)


def behind_attention(net: Decoder, layer: int, x: ir.Value, y: ir.Value) -> ir.Value:
    """Add the output y of attention and the feed-forward layer to x, both with norms behind them."""
    x = net.op("Add", x, layers.rms_norm(net, "post_attention_layernorm", y))
    y = feed_forward(net, layer, x)
    return net.op("Add", x, layers.rms_norm(net, "post_feedforward_layernorm", y))


def layer_inputs(net: Decoder, prefix: str, x: ir.Value) -> Sequence[ir.Value]:
    """Return the input [batch, sequence, width] of each layer, from token ids and embeddings x, or []."""
    c, layer_input = net.config, net.config.layer_input
    if layer_input is None:
        return []
    total = c.num_layers * layer_input.width
    with net.scope(f"{prefix}.embed_tokens_per_layer"):
        looked_up = net.op("Gather", net.weight("weight", layer_input.vocab_size, total), net.input_ids)
        looked_up = layers.scaled(net, looked_up, math.sqrt(layer_input.width))
    with net.scope(prefix):
        projected = layers.linear(net, "per_layer_model_projection", x, c.hidden_size, total)
        projected = layers.scaled(net, projected, c.hidden_size**-0.5)
        projected = layers.head_norm(
            net, "per_layer_projection_norm", projected, c.num_layers, size=layer_input.width
        )
        both = layers.scaled(net, net.op("Add", projected, looked_up), 2**-0.5)
        sizes = net.constant([layer_input.width] * c.num_layers, np.int64, "layer_input_sizes")
        return net.ops("Split", both, sizes, num_outputs=c.num_layers, axis=-1)


def gated_input(net: Decoder, x: ir.Value, layer_values: ir.Value, width: int) -> ir.Value:
    """Return norm(projection(act(gate(x)) * layer_values)); the latter are [batch, sequence, width]."""
    hidden = net.config.hidden_size
    gate = layers.activation(net, layers.linear(net, "per_layer_input_gate", x, hidden, width))
    product = net.op("Mul", gate, layer_values)
    wide = layers.linear(net, "per_layer_projection", product, width, hidden)
    return layers.rms_norm(net, "post_per_layer_input_norm", wide)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Self-attention with norms of query, key and value heads, on the layer's own keys or its owner's."""
    c, kv, bias = net.config, net.config.key_value(layer), net.config.attention_bias
    q_size = c.num_heads * kv.size
    with net.scope("self_attn"):
        q = queries(net, layer, x)
        if kv.owner == layer:
            out = layers.attention(net, layer, q, *keys_and_values(net, kv, x, c.hidden_size, bias=bias))
        else:
            unused = ("k_proj", "v_proj", "k_norm", "v_norm")  # checkpoints may hold them
            net.checkpoint.ignore(*(net.qualified(f"{name}.") for name in unused))
            out = layers.attention_to_owner(net, layer, q)
        return layers.linear(net, "o_proj", out, q_size, c.hidden_size, bias=bias)


def queries(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Return the queries of a layer, with a norm of each head, before they are rotated."""
    c, size = net.config, net.config.key_value(layer).size
    q = layers.linear(net, "q_proj", x, c.hidden_size, c.num_heads * size, bias=c.attention_bias)
    return layers.head_norm(net, "q_norm", q, c.num_heads, size=size)


def keys_and_values(
    net: Decoder, kv: KeyValueConfig, x: ir.Value, hidden: int, *, bias: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Return keys, before rotation, and values of x [batch, sequence, hidden], with norms of heads."""
    width = kv.heads * kv.size
    k = layers.linear(net, "k_proj", x, hidden, width, bias=bias)
    v = k if kv.one_projection else layers.linear(net, "v_proj", x, hidden, width, bias=bias)
    k = layers.head_norm(net, "k_norm", k, kv.heads, size=kv.size)
    with net.scope("v_norm"):
        heads = net.op("Reshape", v, net.ints(0, 0, kv.heads, kv.size))
        return k, net.op("Reshape", layers.plain_rms_norm(net, heads, kv.size), net.ints(0, 0, width))


def feed_forward(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer, and beside it the mixture of experts if there is one."""
    y = layers.gated_mlp(net, layer, layers.rms_norm(net, "pre_feedforward_layernorm", x))
    experts = net.config.experts[layer]
    if experts is None:
        return y
    weights, chosen = route(net, x, experts)
    tokens = layers.rms_norm(net, "pre_feedforward_layernorm_2", x)
    mixed = sparse_mlp(
        *(net, tokens, experts),
        route=lambda *_: (weights, chosen),
        expert=stacked_expert,
        stacked=StackedForm(module=""),
    )
    return net.op(
        "Add",
        layers.rms_norm(net, "post_feedforward_layernorm_1", y),
        layers.rms_norm(net, "post_feedforward_layernorm_2", mixed),
    )


def route(net: Decoder, x: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Return weights and indices of the experts of each token of x [batch, sequence, hidden].

    The weights are a softmax over all experts, scaled to a sum of 1, times a factor of each expert.
    """
    hidden = net.config.hidden_size
    with net.scope("router"):
        tokens = layers.plain_rms_norm(net, net.op("Reshape", x, net.ints(-1, hidden)), hidden)
        scale = net.weight("scale", hidden, view=lambda array: array.astype(np.float32) * hidden**-0.5)
        scores = layers.linear(net, "proj", net.op("Mul", tokens, scale), hidden, experts.count)
        likely = net.op("Softmax", scores, axis=-1)
        weights, chosen = net.ops("TopK", likely, net.ints(experts.per_token), num_outputs=2, axis=-1)
        weights = net.op("Div", weights, net.op("ReduceSum", weights, net.ints(-1), keepdims=1))
        factors = net.op("Gather", net.weight("per_expert_scale", experts.count), chosen)
        return net.op("Mul", weights, factors), chosen
