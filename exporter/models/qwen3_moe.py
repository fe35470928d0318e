"""Qwen 3 with a sparse mixture of experts in some or all layers."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder
from ..layers.experts import mlp
from .qwen2_moe import experts
from .qwen3 import attention

DEFAULTS: RawConfig = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. If ``use_sliding_window`` is set, every layer has the window."""
    raw = with_defaults(raw, DEFAULTS)
    window = integer(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None
    return decoder_config(raw, windows=[window] * integer(raw, "num_hidden_layers"), experts=experts(raw))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)
