"""Gemma 3: a SigLIP tower, the means of squares of patches, a norm and one projection."""

from __future__ import annotations

from typing import Any

from ..architecture import Tensors
from ..tower import SIGLIP, Projector, count, siglip_config

_TOWER, _BEHIND = "vision_tower.vision_model", "multi_modal_projector"


def _config(vision: dict[str, Any], tensors: Tensors, text: dict[str, Any]) -> dict[str, Any]:
    side = (
        count(vision, "image_size")
        // count(vision, "patch_size")
        // count(vision, "projector.scale_factor", 4)
    )
    return {
        "mm_tokens_per_image": side**2,
        "vision_config": {"model_type": "siglip_vision_model", **siglip_config(vision)},
    }


def _preprocessor(vision: dict[str, Any]) -> dict[str, Any]:
    size = vision["image_size"]
    return {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}


NAME = "gemma3"
PROJECTOR = Projector(
    model_type="gemma3",
    decoders=("gemma3",),
    text="model.language_model.",
    layers=f"{_TOWER}.encoder.layers",
    inner=SIGLIP,
    outer={
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
        "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{_TOWER}.post_layernorm",
        "mm.input_projection.weight": f"{_BEHIND}.mm_input_projection_weight",
        "mm.soft_emb_norm": f"{_BEHIND}.mm_soft_emb_norm",
    },
    offsets={"mm.soft_emb_norm.weight": 1.0},
    activation="use_gelu",
    keys=("projector.scale_factor",),
    tokens={"image_token_id": "<image_soft_token>"},
    config=_config,
    preprocessor=_preprocessor,
)
