"""Nomic BERT (https://arxiv.org/abs/2402.01613): rotary positions and gated feed-forward layers.

Checkpoints are read with the names of transformers, or with those of Nomic's own code.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, mapping, number, rope_config, with_defaults
from ..encoder import EncoderConfig, EncoderWriter
from ..encoder import classify_tokens as classify_tokens
from ..post_norm import MODULES, LayerNames, bert_config, embeddings, layers

BASE = "nomic_bert"
UNUSED = ("pooler.", "cls.", "position_ids", "inv_freq")
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
_OWN_NAMES = LayerNames(
    query="attn.Wqkv",
    output="attn.out_proj",
    attention_norm="norm1",
    up="mlp.fc11",
    gate="mlp.fc12",
    down="mlp.fc2",
    norm="norm2",
    fused=True,
)
# Options of Nomic's own code, and the value for which its graph is the one below.
_FIXED = {
    "activation_function": "swiglu",
    "prenorm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "moe_every_n_layers": 0,
    "causal": False,
    "use_rms_norm": False,
    "scale_attn_by_inverse_layer_idx": False,
}


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json.

    Raises:
        UnsupportedModelError: an option changes the graph, such as experts or pre-normalization.
    """
    for key, value in _FIXED.items():
        if raw.get(key) not in (None, value):
            raise UnsupportedModelError(
                f"nomic_bert with {key} {raw[key]!r} is not supported; supported: {value!r}"
            )
    old = {new: raw[old] for new, old in _KEYS.items() if old in raw}
    raw = {"max_position_embeddings": 2048, "hidden_act": "silu", **raw, **old}
    if "n_embd" in raw:
        raw = {**raw, "hidden_act": "silu"}
    c = bert_config({**raw, "position_embedding_type": "absolute"}, labels=labels)
    theta = number(raw, "rotary_emb_base", 1000.0)
    rope = rope_config(
        raw, {"rope_theta": theta, **with_defaults(mapping(raw, "rope_parameters", "rope_scaling"))}
    )
    return replace(c, attention_bias=False, mlp_bias=False, ropes=(rope,) * c.num_layers)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return the states of its last layer."""
    if net.qualified("emb_ln.weight") in net.checkpoint:
        x = embeddings(net, absolute=False, norm="emb_ln")
        return layers(net, x, _OWN_NAMES, scope="encoder.layers")
    return layers(net, embeddings(net, absolute=False), MODULES, scope="layers")


def classify(net: EncoderWriter, raw: RawConfig, states: ir.Value, base: str) -> ir.Value:
    """Write the head of ``NomicBertForSequenceClassification`` and return the logits."""
    size = net.config.hidden_size
    with net.base(base):
        x = net.activation(net.linear("pooler.dense", net.first_token(states), size, size), "tanh")
    return net.linear("classifier", x, size, net.config.labels)
