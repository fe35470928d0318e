"""MPNet (https://arxiv.org/abs/2004.09297): learned positions, and a bias by bucket of distance."""

from __future__ import annotations

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, integer
from ..encoder import Encoder, EncoderConfig
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import (
    LayerNames,
    bert_config,
    embeddings,
    layers,
    positions_of_tokens,
    relative_bias,
    tied_vocabulary,
)

BASE = "mpnet"
UNUSED = ("pooler.", "lm_head.", "position_ids")
# The numbers that MPNet's code has, whatever config.json says.
_PADDING, _BUCKETS, _FARTHEST = 1, 32, 128
_NAMES = LayerNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json.

    Raises:
        UnsupportedModelError: it states another number of buckets than the code of MPNet has.
    """
    if (count := integer(raw, "relative_attention_num_buckets", _BUCKETS)) != _BUCKETS:
        raise UnsupportedModelError(
            f"mpnet with relative_attention_num_buckets {count} is not supported; supported: {_BUCKETS}"
        )
    return bert_config({**raw, "type_vocab_size": 0}, labels=labels, padding=_PADDING)


def build(net: Encoder, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    x = embeddings(net, positions_of_tokens(net, _PADDING), skipped=_PADDING + 1)
    with net.scope("encoder"):
        bias = relative_bias(net, "relative_attention_bias", _BUCKETS, _FARTHEST)
    return layers(net, x, _NAMES, bias=lambda q, k: bias)


def classify(net: Encoder, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``MPNetForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    x = net.activation(net.linear("classifier.dense", net.first_token(states), size, size), "tanh")
    return net.linear("classifier.out_proj", x, size, net.config.labels)


def vocabulary(net: Encoder, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``MPNetForMaskedLM`` and return logits [batch, sequence, vocabulary]."""
    size = net.config.hidden_size
    with net.scope("lm_head"):
        x = net.layer_norm("layer_norm", net.activation(net.linear("dense", states, size, size), "gelu"))
    return tied_vocabulary(net, x, ("lm_head.decoder", "lm_head.bias"), base)
