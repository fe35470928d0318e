"""LFM2 with a sparse mixture of experts in all but the first layers, selected by sigmoids and biases."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, integer, number, with_defaults
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from . import lfm2

DEFAULTS: RawConfig = {
    **lfm2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}
_TINY = 1e-6  # that of the checkpoints' code, added to the sum of a token's weights


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The width of feed-forward layers is the stated one."""
    raw = {**with_defaults(lfm2.renamed(raw), DEFAULTS), "block_auto_adjust_ff_dim": False}
    sparse = ExpertsConfig(
        scope="feed_forward",
        count=integer(raw, "num_experts"),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw["norm_topk_prob"]),
        names=lfm2.NAMES,
        scale=number(raw, "routed_scaling_factor"),
        corrected=bool(raw["use_expert_bias"]),
    )
    dense, count = integer(raw, "num_dense_layers"), integer(raw, "num_hidden_layers")
    return lfm2.hybrid_config(raw, [None if layer < dense else sparse for layer in range(count)])


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return lfm2.build(net, feed_forward)


def feed_forward(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    return lfm2.feed_forward(net, layer, x) if experts is None else sparse_mlp(net, x, experts, route=route)


def route(net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Return weights and indices of each token's experts, both [tokens, per_token].

    The largest scores with the bias select; the weights are the scores without it.
    """
    scores = net.op("Sigmoid", layers.linear(net, "gate", tokens, net.config.hidden_size, experts.count))
    ranks = net.op("Add", scores, net.weight("expert_bias", experts.count)) if experts.corrected else scores
    _, chosen = net.ops("TopK", ranks, net.ints(experts.per_token), num_outputs=2, axis=-1)
    weights = net.op("GatherElements", scores, chosen, axis=1)
    if experts.normalize:
        total = net.op("ReduceSum", weights, net.ints(-1), keepdims=1)
        weights = net.op("Div", weights, net.op("Add", total, net.constant(_TINY, np.float32, "tiny")))
    return layers.scaled(net, weights, experts.scale), chosen
