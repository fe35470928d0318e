"""ERNIE 4.5 with experts: selected by their probability and a bias of each, beside shared ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    ExpertsConfig,
    RawConfig,
    decoder_config,
    integer,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from . import ernie4_5
from .deepseek_v2 import shared_expert
from .llama import attention

DEFAULTS: RawConfig = {
    **{key: value for key, value in ernie4_5.DEFAULTS.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_SMALLEST = 1e-12  # sum of the weights of a token's experts


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``use_bias`` is for all projections but those of routed experts' router."""
    raw = with_defaults(raw, DEFAULTS)
    if raw.get("moe_norm_min", _SMALLEST) != _SMALLEST:
        raise UnsupportedModelError(f"ERNIE 4.5 with moe_norm_min {raw['moe_norm_min']!r} is not supported")
    width, count = integer(raw, "moe_intermediate_size"), integer(raw, "num_hidden_layers")
    sparse = ExpertsConfig(
        scope="mlp",
        # transformers 5 may write num_experts and num_experts_per_tok
        count=integer(raw, "num_experts", integer(raw, "moe_num_experts")),
        per_token=integer(raw, "num_experts_per_tok", integer(raw, "moe_k")),
        width=width,
        normalize=True,
        names=("gate_proj", "up_proj", "down_proj"),
        shared=width * integer(raw, "moe_num_shared_experts"),
    )
    first, last = integer(raw, "moe_layer_start_index"), raw["moe_layer_end_index"]
    last, interval = count - 1 if last == -1 else last, integer(raw, "moe_layer_interval")
    return decoder_config(
        {**raw, "attention_bias": raw["use_bias"], "mlp_bias": raw["use_bias"]},
        ropes=[rope_config(raw, interleaved=True)] * count,
        experts=[
            sparse if first <= layer <= last and (layer + 1) % interval == 0 else None
            for layer in range(count)
        ],
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("mtp")  # layers that predict further tokens
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    return sparse_mlp(net, x, experts, route=route, shared=shared_expert)


def route(net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Select experts by their probability plus a bias; the weights are the probabilities, of a sum of 1."""
    scores = layers.linear(net, "gate", tokens, net.config.hidden_size, experts.count)
    likely = net.op("Softmax", scores, axis=-1)
    with net.scope("moe_statics"):
        bias = net.weight("e_score_correction_bias", 1, experts.count)
    ranks = net.op("Add", likely, bias)
    _, chosen = net.ops("TopK", ranks, net.ints(experts.per_token), num_outputs=2, axis=-1)
    weights = net.op("GatherElements", likely, chosen, axis=1)
    total = net.op("ReduceSum", weights, net.ints(-1), keepdims=1)
    total = net.op("Max", total, net.constant(_SMALLEST, np.float32, "smallest"))
    return net.op("Div", weights, total), chosen
