"""MPNet (https://arxiv.org/abs/2004.09297): learned positions, and a bias by bucket of distance."""

from __future__ import annotations

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, integer
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import (
    LayerNames,
    bert_config,
    embeddings,
    layers,
    positions_of_tokens,
    relative_bias,
)
from .roberta import classify as classify
from .roberta import vocabulary as vocabulary

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


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    x = embeddings(net, positions_of_tokens(net, _PADDING), skipped=_PADDING + 1)
    with net.scope("encoder"):
        bias = relative_bias(net, "relative_attention_bias", _BUCKETS, _FARTHEST)
    return layers(net, x, _NAMES, bias=lambda q, k: bias)
