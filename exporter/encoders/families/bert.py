"""BERT (https://arxiv.org/abs/1810.04805), also MiniLM, E5, BGE and GTE."""

from __future__ import annotations

import onnx_ir as ir

from ...config import RawConfig
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import bert_config, embeddings, layers, tied_vocabulary

BASE = "bert"
UNUSED = ("pooler.", "cls.", "position_ids")


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    return bert_config(raw, labels=labels)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    return layers(net, embeddings(net))


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``BertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    with net.base(base):
        x = net.activation(net.linear("pooler.dense", net.first_token(states), size, size), "tanh")
    return net.linear("classifier", x, size, net.config.labels)


def vocabulary(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``BertForMaskedLM`` and return logits [batch, sequence, vocabulary]."""
    c = net.config
    with net.scope("cls.predictions"):
        x = net.activation(net.linear("transform.dense", states, c.hidden_size, c.hidden_size))
        x = net.layer_norm("transform.LayerNorm", x)
    return tied_vocabulary(net, x, ("cls.predictions.decoder", "cls.predictions.bias"), base)
