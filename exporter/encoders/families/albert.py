"""ALBERT (https://arxiv.org/abs/1909.11942): layers that share their weights in groups."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ....errors import CheckpointError
from ...config import RawConfig, integer
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import LayerNames, bert_config, embeddings, post_norm_layer

BASE = "albert"
UNUSED = ("pooler.", "predictions.", "sop_classifier.", "position_ids")
_NAMES = LayerNames(
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    norm="full_layer_layer_norm",
)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    layers, groups, inner = _counts(raw)
    if not 1 <= groups <= layers or inner < 1:
        raise CheckpointError(f"config.json: {groups} groups of {inner} layers for {layers} layers")
    c = bert_config({"hidden_act": "gelu_new", **raw, "num_hidden_layers": layers * inner}, labels=labels)
    return replace(c, stored_layers=groups)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    count, groups, inner = _counts(raw)
    size = integer(raw, "embedding_size", 128)
    x = embeddings(net, size=size)
    with net.scope("encoder"):
        x = net.linear("embedding_hidden_mapping_in", x, size, net.config.hidden_size)
        for number in range(count):
            with net.scope(f"albert_layer_groups.{number * groups // count}"):
                for part in range(inner):
                    with net.scope(f"albert_layers.{part}"):
                        x = post_norm_layer(net, number * inner + part, x, _NAMES)
    return x


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``AlbertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    with net.base(base):
        x = net.activation(net.linear("pooler", net.first_token(states), size, size), "tanh")
    return net.linear("classifier", x, size, net.config.labels)


def _counts(raw: RawConfig) -> tuple[int, int, int]:
    """Return how often a group runs, the number of groups, and the layers of each."""
    layers, groups = integer(raw, "num_hidden_layers", 12), integer(raw, "num_hidden_groups", 1)
    return layers, groups, integer(raw, "inner_group_num", 1)
