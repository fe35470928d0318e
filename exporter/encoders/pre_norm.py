"""The layers of CLIP (https://arxiv.org/abs/2103.00020) and SigLIP: norms in front of each part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from ..config import RawConfig, integer, number
from .encoder import EncoderConfig, EncoderLayers, EncoderWriter

CLIP_VECTOR = 512  # elements of a vector of CLIP, by default of transformers
Attend = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]  # of queries, keys and values


def pre_norm_layer(net: EncoderLayers, x: ir.Value, attend: Attend) -> ir.Value:
    """Write one layer: x += attention(norm(x)); x += mlp(norm(x)); x is [..., hidden]."""
    hidden = net.config.hidden_size
    normed = net.layer_norm("layer_norm1", x)
    with net.scope("self_attn"):
        q, k, v = (net.linear(name, normed, hidden, hidden) for name in ("q_proj", "k_proj", "v_proj"))
        x = net.op("Add", x, net.linear("out_proj", attend(q, k, v), hidden, hidden))
    return net.op("Add", x, mlp(net, net.layer_norm("layer_norm2", x)))


def mlp(net: EncoderLayers, x: ir.Value) -> ir.Value:
    """Write the feed-forward layer."""
    hidden, inner = net.config.hidden_size, net.config.intermediate_size
    with net.scope("mlp"):
        inside = net.activation(net.linear("fc1", x, hidden, inner))
        return net.linear("fc2", inside, inner, hidden)


def text_config(raw: RawConfig, text: RawConfig, labels: int, size: int, *, causal: bool) -> EncoderConfig:
    """Return the configuration of the encoder of texts beside one of pictures.

    Args:
        raw: the content of config.json.
        text: its ``text_config``, complete.
        labels: see ``EncoderConfig``.
        size: elements of a vector.
        causal: see ``EncoderConfig``.
    """
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(text, "vocab_size"),
        hidden_size=integer(text, "hidden_size"),
        intermediate_size=integer(text, "intermediate_size"),
        num_layers=integer(text, "num_hidden_layers"),
        num_heads=integer(text, "num_attention_heads"),
        max_tokens=integer(text, "max_position_embeddings"),
        hidden_act=text["hidden_act"],
        norm_eps=number(text, "layer_norm_eps"),
        labels=labels,
        output_size=size,
        causal=causal,
    )


def text_states(net: EncoderWriter) -> ir.Value:
    """Write the encoder of texts, and return the normalized states of its last layer."""
    c = net.config
    with net.scope("text_model"):
        with net.scope("embeddings"):
            x = net.op("Gather", net.table("token_embedding", c.vocab_size), net.input_ids)
            x = net.op(
                "Add", x, net.op("Gather", net.table("position_embedding", c.max_tokens), net.positions())
            )
        for layer in range(c.num_layers):
            with net.scope(f"encoder.layers.{layer}"):
                x = pre_norm_layer(net, x, partial(net.attention, layer))
        return net.layer_norm("final_layer_norm", x)
