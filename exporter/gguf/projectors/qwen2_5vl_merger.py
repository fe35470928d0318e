"""Qwen2.5-VL: the tower of Qwen2-VL with RMSNorm, SwiGLU, and windows in most layers."""

from __future__ import annotations

from typing import Any

from ..architecture import Tensors
from ..tower import Projector, count
from .qwen2vl_merger import (
    ATTENTION,
    JOINED,
    KEYS,
    LAYERS,
    OUTER,
    TOKENS,
    UNUSED,
    preprocessor,
    sizes,
    text_config,
)

_WINDOW = 112  # pixels of an edge, in all files; llama.cpp has no key that is read


def _config(vision: dict[str, Any], tensors: Tensors, text: dict[str, Any]) -> dict[str, Any]:
    period = count(vision, "n_wa_pattern")  # the last of so many layers attends to the whole picture
    tower = {
        "hidden_size": vision["embedding_length"],
        "intermediate_size": vision["feed_forward_length"],
        "out_hidden_size": vision["projection_dim"],
        "window_size": count(vision, "window_size", _WINDOW),
        "fullatt_block_indexes": list(range(period - 1, vision["block_count"], period)),
        "hidden_act": "silu",
    }
    return {"text_config": text_config(text), "vision_config": {**sizes(vision), **tower}}


NAME = "qwen2.5vl_merger"
PROJECTOR = Projector(
    model_type="qwen2_5_vl",
    decoders=("qwen2vl",),
    layers=LAYERS,
    inner={**ATTENTION, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    outer=OUTER,
    unused=UNUSED,
    joined=JOINED,
    activation="use_silu",
    keys=(*KEYS, "n_wa_pattern", "window_size"),
    tokens=TOKENS,
    config=_config,
    preprocessor=preprocessor,
)
