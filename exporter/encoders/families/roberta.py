"""RoBERTa (https://arxiv.org/abs/1907.11692)."""

from __future__ import annotations

import onnx_ir as ir

from ...config import RawConfig, integer
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import bert_config, embeddings, layers, positions_of_tokens, tied_vocabulary

BASE = "roberta"
UNUSED = ("pooler.", "lm_head.", "position_ids")


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    return bert_config(raw, labels=labels, padding=_padding(raw))


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    padding = _padding(raw)
    return layers(net, embeddings(net, positions_of_tokens(net, padding), skipped=padding + 1))


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``RobertaForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    x = net.activation(net.linear("classifier.dense", net.first_token(states), size, size), "tanh")
    return net.linear("classifier.out_proj", x, size, net.config.labels)


def vocabulary(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``RobertaForMaskedLM`` and return logits [batch, sequence, vocabulary]."""
    size = net.config.hidden_size
    with net.scope("lm_head"):
        norm = "layer_norm" if "lm_head.layer_norm.weight" in net.checkpoint else "norm"
        x = net.layer_norm(norm, net.activation(net.linear("dense", states, size, size), "gelu"))
    return tied_vocabulary(net, x, ("lm_head.decoder", "lm_head.bias"), base)


def _padding(raw: RawConfig) -> int:
    return integer(raw, "pad_token_id", 1)
