"""OLMoE: experts in every layer, RMSNorm over all heads of q and k."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder
from ..layers.experts import mlp
from .olmo2 import attention
from .qwen2_moe import experts

DEFAULTS: RawConfig = {
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. An expert has ``intermediate_size``."""
    raw = with_defaults(raw, DEFAULTS)
    if raw.get("clip_qkv") is not None:
        raise UnsupportedModelError("OLMoE with clip_qkv, bounds of queries and keys, is not supported")
    return decoder_config(raw, experts=experts({**raw, "moe_intermediate_size": raw["intermediate_size"]}))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)
