"""ModernBERT (https://arxiv.org/abs/2412.13663): rotary positions, local layers, gated layers."""

from __future__ import annotations

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, RopeConfig, integer, layer_windows, mapping, number, rope_config
from ..encoder import EncoderConfig, EncoderWriter
from ..post_norm import tied_vocabulary

BASE = "model"
UNUSED = ("decoder.", "head.")
_THETAS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    count = integer(raw, "num_hidden_layers")
    every = integer(raw, "global_attn_every_n_layers", 3)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(count)
    ]
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=count,
        num_heads=integer(raw, "num_attention_heads"),
        max_tokens=integer(raw, "max_position_embeddings"),
        hidden_act=raw.get("hidden_activation", "gelu"),
        norm_eps=number(raw, "norm_eps", 1e-5),
        norm_bias=bool(raw.get("norm_bias", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        windows=tuple(layer_windows(kinds, integer(raw, "local_attention", 128) // 2)),
        ropes=tuple(_rope(raw, kind) for kind in kinds),
        labels=labels,
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the normalized states of its last layer."""
    c = net.config
    with net.scope("embeddings"):
        x = net.op("Gather", net.table("tok_embeddings", c.vocab_size), net.input_ids)
        x = net.layer_norm("norm", x)
    for layer in range(c.num_layers):
        with net.scope(f"layers.{layer}"):
            normed = net.layer_norm("attn_norm", x) if layer else x  # the embeddings have a norm of their own
            x = net.op("Add", x, _attention(net, layer, normed))
            x = net.op("Add", x, _mlp(net, net.layer_norm("mlp_norm", x)))
    return net.layer_norm("final_norm", x)


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``ModernBertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    match raw.get("classifier_pooling", "cls"):
        case "cls":
            x = net.first_token(states)
        case "mean":
            x = net.mean_token(states)
        case other:
            raise UnsupportedModelError(
                f"classifier_pooling '{other}' is not supported; supported: cls, mean"
            )
    return net.linear("classifier", _head(net, raw, x), size, net.config.labels)


def classify_tokens(net: EncoderWriter, raw: RawConfig, states: ir.Value) -> ir.Value:
    """Write the head of ``ModernBertForTokenClassification``; logits are [batch, sequence, labels]."""
    return net.linear("classifier", _head(net, raw, states), net.config.hidden_size, net.config.labels)


def vocabulary(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``ModernBertForMaskedLM`` and return logits [batch, sequence, vocabulary]."""
    bias = "decoder.bias" if raw.get("decoder_bias", True) else None
    table = "embeddings.tok_embeddings"
    return tied_vocabulary(net, _head(net, raw, states), ("decoder", bias), base, table)


def _head(net: EncoderWriter, raw: RawConfig, x: ir.Value) -> ir.Value:
    size = net.config.hidden_size
    with net.scope("head"):
        x = net.linear("dense", x, size, size, bias=bool(raw.get("classifier_bias", False)))
        return net.layer_norm("norm", net.activation(x, raw.get("classifier_activation", "gelu")))


def _rope(raw: RawConfig, kind: str) -> RopeConfig:
    key, theta = _THETAS[kind]
    given = mapping(mapping(raw, "rope_parameters"), kind)
    return rope_config(raw, {"rope_theta": number(raw, key, theta), **mapping(raw, "rope_scaling"), **given})


def _attention(net: EncoderWriter, layer: int, x: ir.Value) -> ir.Value:
    hidden, bias = net.config.hidden_size, net.config.attention_bias
    with net.scope("attn"):
        q, k, v = net.split_linear("Wqkv", ("q", "k", "v"), x, hidden, hidden, bias=bias)
        return net.linear("Wo", net.attention(layer, q, k, v), hidden, hidden, bias=bias)


def _mlp(net: EncoderWriter, x: ir.Value) -> ir.Value:
    """Write down(act(input) * gate), whose input and gate the checkpoint stores as one layer."""
    hidden, inner, bias = net.config.hidden_size, net.config.intermediate_size, net.config.mlp_bias
    with net.scope("mlp"):
        value, gate = net.split_linear("Wi", ("input", "gate"), x, hidden, inner, bias=bias)
        return net.linear("Wo", net.op("Mul", net.activation(value), gate), inner, hidden, bias=bias)
