"""Small decoders of every family in every quantized form, of sizes that the kernels of all targets accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.runtime.tasks.selftest_models import CONTEXT, FORMS, in_form

__all__ = ["CONTEXT", "FAMILIES", "FORMS", "decoder"]

_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0] * 16,
    "long_factor": [1.5] * 16,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "mistral": {**_WIDE, "sliding_window": 16},
    "qwen2": {**_WIDE, "head_dim": None},
    "qwen3": _WIDE,
    "smollm3": {**_WIDE, "head_dim": None},
    "phi3": {**_WIDE, "head_dim": None, "rope_parameters": _LONG_ROPE},
    "gemma3_text": {**_WIDE, "sliding_window": 16, "query_pre_attn_scalar": 64},
    "gpt2": {"n_embd": 256, "n_head": 4, "n_positions": CONTEXT},
    "mixtral": {**_WIDE, "sliding_window": 16},
    "qwen2_moe": {**_WIDE, **_EXPERTS, "head_dim": None, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**_WIDE, **_EXPERTS},
}


def decoder(family: str, form: str, folder: Path) -> ir.Model:
    """Return a portable decoder; ranges and scales of activations are invented."""
    checkpoint = folder / family
    if not checkpoint.exists():
        write_tiny(family, checkpoint, **FAMILIES[family])
    return in_form(export_model(checkpoint), form)
