"""DistilBERT (https://arxiv.org/abs/1910.01108)."""

from __future__ import annotations

import onnx_ir as ir

from ...config import RawConfig
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import LayerNames, bert_config, embeddings, layers, tied_vocabulary

BASE = "distilbert"
UNUSED = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "position_ids")
_KEYS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_NAMES = LayerNames(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    return bert_config(
        {
            **raw,
            **{ours: raw[theirs] for ours, theirs in _KEYS.items() if theirs in raw},
            "type_vocab_size": 0,
        },
        labels=labels,
    )


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    return layers(net, embeddings(net), _NAMES, scope="transformer.layer")


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``DistilBertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    x = net.activation(net.linear("pre_classifier", net.first_token(states), size, size), "relu")
    return net.linear("classifier", x, size, net.config.labels)


def vocabulary(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``DistilBertForMaskedLM`` and return logits [batch, sequence, vocabulary]."""
    size = net.config.hidden_size
    x = net.activation(net.linear("vocab_transform", states, size, size))
    x = net.layer_norm("vocab_layer_norm", x)
    return tied_vocabulary(net, x, ("vocab_projector", "vocab_projector.bias"), base)
