"""The encoder of BERT (https://arxiv.org/abs/1810.04805): learned positions, norms behind each part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import RawConfig, integer, number
from .encoder import Encoder, EncoderConfig


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's modules in the checkpoint."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"


BERT = LayerNames()


def bert_config(raw: RawConfig, *, labels: int, padding: int | None = None) -> EncoderConfig:
    """Convert the config.json of a model with the layers of BERT.

    Args:
        raw: the content of config.json.
        labels: see ``EncoderConfig``.
        padding: the id of the padding token, if positions are counted from the number behind it.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
        UnsupportedModelError: the model is a decoder, or has other positions.
    """
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise UnsupportedModelError(f"a decoder with model_type '{raw['model_type']}' is not supported")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        kind = raw["position_embedding_type"]
        raise UnsupportedModelError(f"position_embedding_type '{kind}' is not supported; supported: absolute")
    positions = integer(raw, "max_position_embeddings", 512)
    return EncoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=integer(raw, "num_attention_heads"),
        max_tokens=positions if padding is None else positions - padding - 1,
        hidden_act=raw.get("hidden_act", "gelu"),
        norm_eps=number(raw, "layer_norm_eps", 1e-12),
        token_types=integer(raw, "type_vocab_size", 2),
        labels=labels,
    )


def embeddings(net: Encoder, positions: ir.Value | None = None, *, skipped: int = 0) -> ir.Value:
    """Return the normalized sum of the embeddings of tokens, positions and token types.

    Args:
        net: the graph to write into.
        positions: rows [batch, sequence] of the table of positions; None for 0, 1, ...
        skipped: rows of this table that belong to no position of a text.
    """
    c = net.config
    with net.scope("embeddings"):
        x = net.op("Gather", net.table("word_embeddings", c.vocab_size), net.input_ids)
        if c.token_types:
            types = net.table("token_type_embeddings", c.token_types)
            kinds = net.token_type_ids
            kinds = net.constant(0, np.int64, "first") if kinds is None else kinds
            x = net.op("Add", x, net.op("Gather", types, kinds))
        table = net.table("position_embeddings", c.max_tokens + skipped)
        x = net.op("Add", x, net.op("Gather", table, net.positions() if positions is None else positions))
        return net.layer_norm("LayerNorm", x)


def positions_of_tokens(net: Encoder, padding: int) -> ir.Value:
    """Return positions [batch, sequence] as in RoBERTa: padding + 1, ... of tokens, else ``padding``."""
    with net.unscoped("positions"):
        token = net.op("Not", net.op("Equal", net.input_ids, net.constant(padding, np.int64, "padding")))
        token = net.op("Cast", token, to=ir.DataType.INT64)
        count = net.op("CumSum", token, net.constant(1, np.int64, "axis"))
        return net.op("Add", net.op("Mul", count, token), net.constant(padding, np.int64, "padding"))


def layers(net: Encoder, x: ir.Value, names: LayerNames = BERT, *, scope: str = "encoder.layer") -> ir.Value:
    """Write the layers: x = norm(x + attention(x)); x = norm(x + mlp(x))."""
    c = net.config
    hidden, inner = c.hidden_size, c.intermediate_size
    for layer in range(c.num_layers):
        with net.scope(f"{scope}.{layer}"):
            q, k, v = (net.linear(n, x, hidden, hidden) for n in (names.query, names.key, names.value))
            attended = net.linear(names.output, net.attention(layer, q, k, v), hidden, hidden)
            x = net.layer_norm(names.attention_norm, net.op("Add", attended, x))
            inside = net.activation(net.linear(names.up, x, hidden, inner))
            x = net.layer_norm(names.norm, net.op("Add", net.linear(names.down, inside, inner, hidden), x))
    return x
