"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder
from ..layers.experts import mlp
from .llama import attention

DEFAULTS: RawConfig = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 131_072,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    experts = ExpertsConfig(
        scope="block_sparse_moe",
        count=integer(raw, "num_local_experts"),
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "intermediate_size"),
        normalize=True,
        names=("w1", "w3", "w2"),
    )
    num_layers = integer(raw, "num_hidden_layers")
    return decoder_config(
        raw, windows=[raw.get("sliding_window")] * num_layers, experts=[experts] * num_layers
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)
