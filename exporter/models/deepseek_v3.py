"""DeepSeek-V3 and R1: V2 with experts selected by sigmoids and a correction of each expert's load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, with_defaults
from ..decoder import Decoder
from ..layers import draft_heads
from ..layers.experts import sparse_mlp
from .deepseek_v2 import attention, in_best_groups, latent_config, shared_expert

DEFAULTS: RawConfig = {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A missing q_lora_rank is 1536, one of null means no compression of queries."""
    raw = with_defaults({"q_lora_rank": 1536, **raw}, DEFAULTS)
    return latent_config(raw, interleaved=bool(raw["rope_interleave"]))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    without_speculation(net)
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def without_speculation(net: Decoder) -> None:
    """Ignore the checkpoint's layers for the prediction of more than one token, behind the decoder's."""
    c = net.config
    net.checkpoint.ignore(*(f"model.layers.{c.num_layers + i}." for i in range(c.unused_layers)))


def draft_head(net: Decoder) -> ir.Value:
    """Write the first of the layers for speculation, and return its logits."""
    return nextn_head(net, attention)


def nextn_head(net: Decoder, attention: Callable[[Decoder, int, ir.Value], ir.Value]) -> ir.Value:
    """Write the layer behind the decoder's, which predicts the token behind the next one."""
    names = draft_heads.nextn_names(net.config.unused_layers)
    layer = partial(layers.pre_norm_layer, attention=attention, mlp=mlp)
    return draft_heads.draft_head(net, names, norm=layers.rms_norm, layer=layer)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the experts of the layer, or its dense feed-forward layer."""
    experts = net.config.experts[layer]
    if experts is None:
        return layers.gated_mlp(net, layer, x)
    return sparse_mlp(net, x, experts, route=route, shared=shared_expert)


def route(
    net: Decoder, tokens: ir.Value, experts: ExpertsConfig, correction: str = "e_score_correction_bias"
) -> tuple[ir.Value, ir.Value]:
    """Select experts by corrected scores; the weights are the scores without correction.

    The score of a group is the sum of its two best experts' (https://arxiv.org/abs/2412.19437).
    """
    count, size = experts.count, experts.count // experts.groups
    scores = net.op("Sigmoid", layers.linear(net, "gate", tokens, net.config.hidden_size, count))
    with net.scope("gate"):
        corrected = net.op("Add", scores, net.weight(correction, count))
    by_group = net.op("Reshape", corrected, net.ints(-1, experts.groups, size))
    two, _ = net.ops("TopK", by_group, net.ints(min(2, size)), num_outputs=2, axis=-1)
    best = net.op("ReduceSum", two, net.ints(-1), keepdims=0)
    kept = in_best_groups(net, by_group, best, experts)
    _, chosen = net.ops("TopK", kept, net.ints(experts.per_token), num_outputs=2, axis=-1)
    weights = net.op("GatherElements", scores, chosen, axis=1)
    if experts.normalize:
        total = net.op("ReduceSum", weights, net.ints(-1), keepdims=1)
        weights = net.op("Div", weights, net.op("Add", total, net.constant(1e-20, np.float32, "tiny")))
    return layers.scaled(net, weights, experts.scale), chosen
