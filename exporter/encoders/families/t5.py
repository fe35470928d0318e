"""The encoder of T5 (https://arxiv.org/abs/1910.10683): a bias by bucket of distance."""

from __future__ import annotations

import onnx_ir as ir

from ...config import RawConfig, integer, number
from ..encoder import EncoderConfig, EncoderWriter
from ..post_norm import relative_bias

BASE = "transformer"
UNUSED = ("decoder.", "lm_head.", "encoder.embed_tokens.")


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json; ``n_positions`` is the length that it was trained with, no limit."""
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "d_model"),
        intermediate_size=integer(raw, "d_ff"),
        num_layers=integer(raw, "num_layers"),
        num_heads=integer(raw, "num_heads"),
        max_tokens=integer(raw, "n_positions", 512),
        hidden_act=_activation(raw)[1],
        norm_eps=number(raw, "layer_norm_epsilon", 1e-6),
        labels=labels,
        head_size=integer(raw, "d_kv"),
        scale=1.0,
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the normalized states of its last layer."""
    c = net.config
    x = net.op("Gather", net.table("shared", c.vocab_size), net.input_ids)
    count = integer(raw, "relative_attention_num_buckets", 32)
    most = integer(raw, "relative_attention_max_distance", 128)
    with net.scope("encoder"):
        with net.scope("block.0.layer.0.SelfAttention"):
            bias = relative_bias(net, "relative_attention_bias", count, most)
        for layer in range(c.num_layers):
            with net.scope(f"block.{layer}"):
                x = _attention(net, layer, x, bias)
                x = _mlp(net, x, gated=_activation(raw)[0])
        return net.rms_norm("final_layer_norm", x)


def _activation(raw: RawConfig) -> tuple[bool, str]:
    """Return whether the feed-forward layer has a gate, and its activation."""
    name = str(raw.get("feed_forward_proj", "relu"))
    gated = name.startswith("gated-")
    name = name.removeprefix("gated-")
    return gated, "gelu_new" if gated and name == "gelu" else name


def _attention(net: EncoderWriter, layer: int, x: ir.Value, bias: ir.Value) -> ir.Value:
    c = net.config
    with net.scope("layer.0"):
        normed = net.rms_norm("layer_norm", x)
        with net.scope("SelfAttention"):
            q, k, v = (net.linear(name, normed, c.hidden_size, c.q_size, bias=False) for name in "qkv")
            y = net.linear("o", net.attention(layer, q, k, v, bias), c.q_size, c.hidden_size, bias=False)
        return net.op("Add", x, y)


def _mlp(net: EncoderWriter, x: ir.Value, *, gated: bool) -> ir.Value:
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("layer.1"):
        y = net.rms_norm("layer_norm", x)
        with net.scope("DenseReluDense"):
            inside = net.activation(net.linear("wi_0" if gated else "wi", y, hidden, inner, bias=False))
            if gated:
                inside = net.op("Mul", inside, net.linear("wi_1", y, hidden, inner, bias=False))
            y = net.linear("wo", inside, inner, hidden, bias=False)
        return net.op("Add", x, y)
