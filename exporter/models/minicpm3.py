"""MiniCPM 3: latent attention of DeepSeek-V2, with factors of the embedding, residual sums and logits."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, integer, number, with_defaults
from ..decoder import Decoder
from . import granite
from .deepseek_v2 import attention, latent_config

DEFAULTS: RawConfig = {
    "kv_lora_rank": 256,
    "max_position_embeddings": 32_768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "scale_emb": 12.0,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Of ``scale_depth`` and ``dim_model_base``, null means a factor of 1."""
    depth, base = raw.get("scale_depth", 1.4), raw.get("dim_model_base", 256)
    rank = raw.get("q_lora_rank", 768)
    raw = with_defaults(raw, DEFAULTS)
    hidden, count = integer(raw, "hidden_size"), integer(raw, "num_hidden_layers")
    size = integer(raw, "v_head_dim", hidden // integer(raw, "num_attention_heads"))
    own: RawConfig = {"first_k_dense_replace": count, "q_lora_rank": rank, "v_head_dim": size}
    return dataclasses.replace(
        latent_config({**raw, **own}, interleaved=False),
        embedding_scale=number(raw, "scale_emb"),
        residual_scale=1.0 if depth is None else depth / math.sqrt(count),
        logits_scale=1.0 if base is None else base / hidden,
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return granite.build(net, mix=attention)
