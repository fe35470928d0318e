"""DeepSeek-V2: latent attention with expanded keys and values, routed experts of groups, shared experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    RawConfig,
    decoder_config,
    integer,
    mapping,
    number,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from ..weights import Array

DEFAULTS: RawConfig = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
LATENT_EPSILON = 1e-6  # of the norms of compressed queries, keys and values, whatever rms_norm_eps is
_METHODS = ("greedy", "group_limited_greedy")


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A missing q_lora_rank is 1536, one of null means no compression of queries."""
    raw = {"q_lora_rank": 1536, **raw}
    filled = with_defaults(raw, DEFAULTS)
    if filled["topk_method"] not in _METHODS:
        raise UnsupportedModelError(
            f"DeepSeek-V2 with topk_method '{filled['topk_method']}' is not supported; supported: "
            f"{', '.join(_METHODS)}"
        )
    if filled.get("norm_topk_prob"):
        raise UnsupportedModelError("DeepSeek-V2 with norm_topk_prob is not supported")
    if filled["topk_method"] == "greedy":
        filled = {**filled, "n_group": 1, "topk_group": 1}
    return latent_config(filled, interleaved=True)


def latent_config(raw: RawConfig, *, interleaved: bool) -> DecoderConfig:
    """Return the configuration of a decoder with latent attention and experts of groups."""
    if integer(raw, "moe_layer_freq", 1) != 1:
        raise UnsupportedModelError("moe_layer_freq other than 1 is not supported")
    rotary, plain = integer(raw, "qk_rope_head_dim"), integer(raw, "qk_nope_head_dim")
    if integer(raw, "v_head_dim") > rotary + plain:
        raise UnsupportedModelError(
            "v_head_dim larger than qk_nope_head_dim + qk_rope_head_dim is not supported"
        )
    count, dense = integer(raw, "num_hidden_layers"), integer(raw, "first_k_dense_replace")
    sparse = grouped_experts(raw) if dense < count else None
    rope = rope_config({**raw, "head_dim": rotary}, interleaved=interleaved)
    heads: dict[str, Any] = {"head_dim": rotary + plain, "num_key_value_heads": raw["num_attention_heads"]}
    normalised = decoder_config(
        {**raw, **heads},
        ropes=[rope] * count,
        experts=[None if layer < dense else sparse for layer in range(count)],
    )
    return dataclasses.replace(
        normalised,
        attention_scale=normalised.attention_scale * _yarn_scale(raw),
        latent=LatentConfig(
            query_rank=integer(raw, "q_lora_rank") if raw.get("q_lora_rank") else None,
            key_value_rank=integer(raw, "kv_lora_rank"),
            rotary=rotary,
            plain=plain,
            value=integer(raw, "v_head_dim"),
        ),
        unused_layers=integer(raw, "num_nextn_predict_layers", 0),
    )


def grouped_experts(raw: RawConfig) -> ExpertsConfig:
    """Return the mixture of experts of groups, beside shared experts, of a layer."""
    return ExpertsConfig(
        scope="mlp",
        count=integer(raw, "n_routed_experts"),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
        names=("gate_proj", "up_proj", "down_proj"),
        shared=integer(raw, "moe_intermediate_size") * integer(raw, "n_shared_experts"),
        groups=integer(raw, "n_group"),
        groups_per_token=integer(raw, "topk_group"),
        scale=number(raw, "routed_scaling_factor"),
    )


def _yarn_scale(raw: RawConfig) -> float:
    """Return the factor of the scores: the square of YaRN's, for the key ``mscale_all_dim``."""
    rope = with_defaults(mapping(raw, "rope_parameters", "rope_scaling"))
    factor, scale = number(rope, "factor", 1.0), number(rope, "mscale_all_dim", 0.0)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not scale or factor <= 1:
        return 1.0
    return float((0.1 * scale * math.log(factor) + 1) ** 2)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def attention(
    net: Decoder,
    layer: int,
    x: ir.Value,
    *,
    scope: str = "self_attn",
    output: str = "o_proj",
    gate: str | None = None,
) -> ir.Value:
    """Latent attention. A head is [rotary, plain] elements; values are padded to the size of keys.

    Args:
        net: the graph to write into.
        layer: the layer.
        x: [batch, sequence, hidden].
        scope: the module of attention.
        output: its last projection.
        gate: its projection to a gate of each head, behind whose sigmoid the heads are multiplied.
    """
    c, latent = net.config, net.config.latent
    if latent is None:
        raise AssertionError("unreachable: latent_config sets it")
    heads, size = c.num_heads, c.head_dim
    with net.scope(scope):
        q = _queries(net, x, latent)
        parts = {"kv_a_proj": latent.key_value_rank, "k_rope_proj": latent.rotary}
        fused = "kv_a_proj_with_mqa"
        compressed, rotary = layers.split_linear(net, fused, parts, x, c.hidden_size, bias=c.attention_bias)
        rank = latent.key_value_rank
        compressed = layers.rms_norm(net, "kv_a_layernorm", compressed, rank, epsilon=LATENT_EPSILON)
        shape = (heads * (latent.plain + latent.value), rank)
        plain = layers.selected_linear(
            net, "kv_b_proj", "k_b_proj", compressed, shape, _key_rows(latent, heads)
        )
        v = layers.selected_linear(
            net, "kv_b_proj", "v_b_proj", compressed, shape, _value_rows(latent, heads)
        )
        plain = net.op("Reshape", plain, net.ints(0, 0, heads, latent.plain))
        shared = net.op("Expand", net.op("Unsqueeze", rotary, net.ints(2)), net.ints(1, 1, heads, 1))
        k = net.op("Reshape", net.op("Concat", shared, plain, axis=3), net.ints(0, 0, heads * size))
        out = net.op("Reshape", layers.attention(net, layer, q, k, v), net.ints(0, 0, heads, size))
        out = net.op("Slice", out, net.ints(0), net.ints(latent.value), net.ints(3))
        if gate is not None:
            shares = net.op("Sigmoid", layers.linear(net, gate, x, c.hidden_size, heads))
            out = net.op("Mul", out, net.op("Unsqueeze", shares, net.ints(-1)))
        out = net.op("Reshape", out, net.ints(0, 0, heads * latent.value))
        width = heads * latent.value
        return layers.linear(net, output, out, width, c.hidden_size, bias=c.attention_bias)


def _queries(net: Decoder, x: ir.Value, latent: LatentConfig) -> ir.Value:
    c, rows = net.config, _rotary_first(latent, net.config.num_heads)
    if latent.query_rank is None:
        return layers.selected_linear(net, "q_proj", "q_proj", x, (c.q_size, c.hidden_size), rows)
    rank = latent.query_rank
    x = layers.linear(net, "q_a_proj", x, c.hidden_size, rank, bias=c.attention_bias)
    x = layers.rms_norm(net, "q_a_layernorm", x, rank, epsilon=LATENT_EPSILON)
    return layers.selected_linear(net, "q_b_proj", "q_b_proj", x, (c.q_size, rank), rows)


def _rotary_first(latent: LatentConfig, heads: int) -> layers.View:
    def view(array: Array) -> Array:
        by_head = array.reshape(heads, latent.plain + latent.rotary, -1)
        return np.roll(by_head, latent.rotary, axis=1).reshape(array.shape)

    return view


def _key_rows(latent: LatentConfig, heads: int) -> layers.View:
    def view(array: Array) -> Array:
        by_head = array.reshape(heads, latent.plain + latent.value, -1)
        return by_head[:, : latent.plain].reshape(heads * latent.plain, -1)

    return view


def _value_rows(latent: LatentConfig, heads: int) -> layers.View:
    missing = latent.plain + latent.rotary - latent.value

    def view(array: Array) -> Array:
        by_head = array.reshape(heads, latent.plain + latent.value, -1)[:, latent.plain :]
        return np.pad(by_head, ((0, 0), (0, missing), (0, 0))).reshape(-1, by_head.shape[2])

    return view


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    return sparse_mlp(net, x, experts, route=route, shared=shared_expert)


def route(net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Select experts by their softmax among those of the groups with the largest maximum."""
    scores = layers.linear(net, "gate", tokens, net.config.hidden_size, experts.count)
    likely = net.op("Softmax", scores, axis=-1)
    if experts.groups > 1:
        by_group = net.op("Reshape", likely, net.ints(-1, experts.groups, experts.count // experts.groups))
        best = net.op("ReduceMax", by_group, net.ints(-1), keepdims=0)
        likely = in_best_groups(net, by_group, best, experts)
    weights, chosen = net.ops("TopK", likely, net.ints(experts.per_token), num_outputs=2, axis=-1)
    return layers.scaled(net, weights, experts.scale), chosen


def in_best_groups(net: Decoder, by_group: ir.Value, scores: ir.Value, experts: ExpertsConfig) -> ir.Value:
    """Return ``by_group`` as [tokens, experts], with the lowest float outside of the best groups.

    Args:
        net: the graph to write into.
        by_group: a number for each expert, [tokens, groups, experts of a group].
        scores: of the groups, [tokens, groups].
        experts: number of groups and of those that are best.
    """
    _, best = net.ops("TopK", scores, net.ints(experts.groups_per_token), num_outputs=2, axis=-1)
    depth = net.constant(experts.groups, np.int64, "groups")
    one_hot = net.op("OneHot", best, depth, net.ints(0, 1), axis=-1)
    is_best = net.op("Cast", net.op("ReduceSum", one_hot, net.ints(1), keepdims=0), to=ir.DataType.BOOL)
    lowest = net.constant(np.finfo(np.float32).min, np.float32, "hidden")
    kept = net.op("Where", net.op("Unsqueeze", is_best, net.ints(2)), by_group, lowest)
    return net.op("Reshape", kept, net.ints(-1, experts.count))


def shared_expert(net: Decoder, x: ir.Value, experts: ExpertsConfig) -> ir.Value:
    """Write the shared experts, which are stored as one."""
    with net.scope("shared_experts"):
        return layers.gated_linear_unit(net, x, experts.names, experts.shared)
