"""GTE (https://arxiv.org/abs/2407.19669) in the form of transformers: rotary positions, gated layers.

Checkpoints are read with the names of transformers' modules, or with those that it saves.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ...config import RawConfig, mapping, number, rope_config
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import MODULES, LayerNames, bert_config, embeddings, layers
from .bert import classify as classify
from .roberta import vocabulary as vocabulary

BASE = ("gte", "new")
UNUSED = ("pooler.", "lm_head.", "inv_freq")
_OWN_NAMES = LayerNames(
    query="attention.qkv_proj",
    output="attention.o_proj",
    attention_norm="attn_ln",
    up="mlp.up_gate_proj",
    down="mlp.down_proj",
    norm="mlp_ln",
    fused=True,
    fused_gate=True,
)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    raw = {"type_vocab_size": 1, "max_position_embeddings": 8192, **raw}
    c = bert_config({**raw, "position_embedding_type": "absolute"}, labels=labels)
    parameters = {"rope_theta": number(raw, "rope_theta", 160_000.0), **mapping(raw, "rope_parameters")}
    ropes = (rope_config(raw, parameters),) * c.num_layers
    return replace(c, mlp_bias=False, down_bias=True, ropes=ropes)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    x = embeddings(net, absolute=False)
    if net.qualified("encoder.layer.0.attn_ln.weight") in net.checkpoint:
        return layers(net, x, _OWN_NAMES)
    return layers(net, x, MODULES, scope="layers")
