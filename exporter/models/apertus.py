"""Apertus: norms of heads, and a feed-forward layer without a gate, with a learned activation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder
from .qwen3 import attention

DEFAULTS: RawConfig = {
    "hidden_act": "xielu",
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
}
ROPE: RawConfig = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_BETA, _EPSILON = 0.5, -1e-6  # of xIELU, where the checkpoint has none


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = {**raw, "rope_parameters": ROPE}
    return decoder_config(raw)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("rotary_emb.inv_freq")
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, attention(net, layer, layers.rms_norm(net, "attention_layernorm", x)))
            x = net.op("Add", x, mlp(net, layers.rms_norm(net, "feedforward_layernorm", x)))
    x = layers.rms_norm(net, "model.norm", x)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")


def mlp(net: Decoder, x: ir.Value) -> ir.Value:
    """Write down(act(up(x)))."""
    hidden, width, bias = net.config.hidden_size, net.config.intermediate_size, net.config.mlp_bias
    with net.scope("mlp"):
        x = layers.linear(net, "up_proj", x, hidden, width, bias=bias)
        x = xielu(net, x) if net.config.hidden_act == "xielu" else layers.activation(net, x)
        return layers.linear(net, "down_proj", x, width, hidden, bias=bias)


def xielu(net: Decoder, x: ir.Value) -> ir.Value:
    """Write xIELU (Huang and Schlag, https://arxiv.org/abs/2411.13010), with two learned factors.

    For positive x it is p * x^2 + beta * x, else n * (exp(min(x, epsilon)) - 1 - x) + beta * x.
    """

    def stored(name: str, default: float, *shape: int) -> float:
        if net.qualified(name) not in net.checkpoint:
            return default
        return float(net.checkpoint.tensor(net.qualified(name), shape).numpy().astype(np.float32).sum())

    with net.scope("act_fn"):
        beta, epsilon = stored("beta", _BETA), stored("eps", _EPSILON)
        positive, negative = (np.logaddexp(0.0, stored(name, 0.0, 1)) for name in ("alpha_p", "alpha_n"))
        negative += beta
        zero, one, limit = (net.constant(value, np.float32, "xielu") for value in (0, 1, epsilon))
        squares = layers.scaled(net, net.op("Mul", x, x), float(positive))
        powers = net.op("Sub", net.op("Exp", net.op("Min", x, limit)), one)
        below = layers.scaled(net, net.op("Sub", powers, x), float(negative))
        curved = net.op("Where", net.op("Greater", x, zero), squares, below)
        return net.op("Add", curved, layers.scaled(net, x, beta))
