"""Phi 3.5 MoE: LayerNorm, biases, and two experts of each token, chosen one after the other."""

from __future__ import annotations

import dataclasses

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
    mapping,
    number,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..layers.experts import sparse_mlp
from .llama import attention

DEFAULTS: RawConfig = {
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "router_jitter_noise": 0.01,
    "max_position_embeddings": 131_072,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``short_mscale`` and ``long_mscale`` are factors of cosines and sines."""
    raw = with_defaults(raw, DEFAULTS)
    if integer(raw, "num_experts_per_tok") != 2:
        raise UnsupportedModelError("phimoe chooses two experts; other num_experts_per_tok is not supported")
    if raw.get("sliding_window") is not None and integer(raw, "sliding_window") < integer(
        raw, "max_position_embeddings"
    ):
        raise UnsupportedModelError("phimoe with a sliding_window below its context is not supported")
    count = integer(raw, "num_hidden_layers")
    experts = ExpertsConfig(
        scope="block_sparse_moe",
        count=integer(raw, "num_local_experts"),
        per_token=2,
        width=integer(raw, "intermediate_size"),
        normalize=False,
        names=("w1", "w3", "w2"),
        tolerance=2.0 * number(raw, "router_jitter_noise"),
    )
    rope = rope_config(raw)
    if rope.rope_type != "default":
        parameters = with_defaults(mapping(raw, "rope_parameters", "rope_scaling"))
        factors = {number(parameters, f"{name}_mscale") for name in ("short", "long")}
        if len(factors) > 1:
            raise UnsupportedModelError(
                "phimoe with a long_mscale that differs from short_mscale is not supported"
            )
        rope = dataclasses.replace(rope, attention_factor=factors.pop())
    return decoder_config(raw, ropes=[rope] * count, experts=[experts] * count)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    net.checkpoint.ignore("rotary_emb.inv_freq")
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(c.num_layers):
        experts = c.experts[layer]
        assert experts is not None  # noqa: S101 -- ``config`` sets it for each layer
        with net.scope(f"model.layers.{layer}"):
            y = attention(net, layer, layers.layer_norm(net, "input_layernorm", x))
            x = net.op("Add", x, y)
            y = layers.layer_norm(net, "post_attention_layernorm", x)
            x = net.op("Add", x, sparse_mlp(net, y, experts, route=route))
    x = layers.layer_norm(net, "model.norm", x)
    bias = "lm_head.bias" in net.checkpoint
    return layers.linear(net, "lm_head", x, c.hidden_size, c.vocab_size, bias=bias)


def route(net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
    """Choose the best expert, then the best of the others (SparseMixer, https://arxiv.org/abs/2409.12136).

    The weight of each is its softmax among those whose scores are near it.
    """
    scores = layers.linear(net, "gate", tokens, net.config.hidden_size, experts.count)
    _, chosen = net.ops("TopK", scores, net.ints(2), num_outputs=2, axis=-1)
    first, second = net.ops("Split", chosen, net.ints(1, 1), num_outputs=2, axis=-1)
    lowest = net.constant(-np.inf, np.float32, "hidden")
    hidden = net.op("Expand", lowest, net.op("Shape", first))
    others = net.op("ScatterElements", scores, first, hidden, axis=1)
    weights = [
        net.op("GatherElements", _near(net, scores, kept, place, experts.tolerance), place, axis=1)
        for kept, place in ((scores, first), (others, second))
    ]
    return net.op("Concat", *weights, axis=-1), chosen


def _near(net: Decoder, scores: ir.Value, kept: ir.Value, best: ir.Value, tolerance: float) -> ir.Value:
    """Return the softmax of ``kept`` among the scores that are near that of the expert ``best``."""
    largest = net.op("GatherElements", scores, best, axis=1)
    size = net.op("Max", net.op("Abs", scores), largest)
    distance = net.op("Div", net.op("Sub", largest, scores), size)
    far = net.op("Greater", distance, net.constant(tolerance, np.float32, "tolerance"))
    lowest = net.constant(-np.inf, np.float32, "hidden")
    return net.op("Softmax", net.op("Where", far, lowest, kept), axis=-1)
