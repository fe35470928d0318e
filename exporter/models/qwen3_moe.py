"""Qwen 3 with mixtures of experts, in all layers or in some."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, ExpertsConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder
from ..experts import mlp
from .qwen3 import attention

DEFAULTS: RawConfig = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A window, where switched on, is that of every layer."""
    raw = with_defaults(raw, DEFAULTS)
    # transformers 5 may write the number of experts under its other name
    count = integer(raw, "num_local_experts", integer(raw, "num_experts"))
    experts = ExpertsConfig(
        scope="mlp",
        count=count,
        per_token=integer(raw, "num_experts_per_tok"),
        width=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
        names=("gate_proj", "up_proj", "down_proj"),
    )
    dense, step = raw["mlp_only_layers"], integer(raw, "decoder_sparse_step")
    num_layers = integer(raw, "num_hidden_layers")
    window = integer(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None
    return decoder_config(
        raw,
        windows=[window] * num_layers,
        experts=[
            experts if count and layer not in dense and (layer + 1) % step == 0 else None
            for layer in range(num_layers)
        ],
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)
