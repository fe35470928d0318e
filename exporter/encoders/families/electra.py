"""ELECTRA (https://arxiv.org/abs/2003.10555): BERT, whose embeddings may be narrower than its states."""

from __future__ import annotations

import onnx_ir as ir

from ...config import RawConfig, integer
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import bert_config, embeddings, layers

BASE = "electra"
UNUSED = ("discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "position_ids")


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    return bert_config(raw, labels=labels)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    hidden = net.config.hidden_size
    size = integer(raw, "embedding_size", 128)
    x = embeddings(net, size=size)
    return layers(net, x if size == hidden else net.linear("embeddings_project", x, size, hidden))


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``ElectraForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    x = net.activation(net.linear("classifier.dense", net.first_token(states), size, size), "gelu")
    return net.linear("classifier.out_proj", x, size, net.config.labels)
