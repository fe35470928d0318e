"""Jina Embeddings v3 (https://arxiv.org/abs/2409.10173) in the form of transformers: rotary positions.

Checkpoints are read with the names of transformers' modules, or with those that it saves. Tensors of
adapters for tasks are reported as unused.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ...config import RawConfig, mapping, number, rope_config
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import MODULES, LayerNames, bert_config, embeddings, layers
from .roberta import classify as classify
from .roberta import vocabulary as vocabulary

BASE = "roberta"
UNUSED = ("pooler.", "lm_head.", "position_ids")
_NAMES = replace(MODULES, up="mlp.fc1", gate="", down="mlp.fc2")
_OWN_NAMES = LayerNames(
    query="mixer.Wqkv",
    output="mixer.out_proj",
    attention_norm="norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="norm2",
    fused=True,
)


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    raw = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 8194, **raw}
    c = bert_config({**raw, "position_embedding_type": "absolute"}, labels=labels)
    parameters = {"rope_theta": number(raw, "rope_theta", 20_000.0), **mapping(raw, "rope_parameters")}
    return replace(c, ropes=(rope_config(raw, parameters),) * c.num_layers)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    if net.qualified("emb_ln.weight") in net.checkpoint:
        return layers(net, embeddings(net, absolute=False, norm="emb_ln"), _OWN_NAMES, scope="encoder.layers")
    return layers(net, embeddings(net, absolute=False), _NAMES, scope="layers")
