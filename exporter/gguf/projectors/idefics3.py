"""Idefics3, and SmolVLM, whose files say the same: a SigLIP tower, pixel shuffle and one projection."""

from __future__ import annotations

from typing import Any

from ..architecture import Tensors
from ..tower import SIGLIP, Projector, count, siglip_config

_TOWER = "model.vision_model"
# Files of early converters do not state it. It is so in the published checkpoints: 364 and 1456 pixels,
# 384 and 1536, 512 and 2048.
_TILES_OF_EDGE = 4


def _config(vision: dict[str, Any], tensors: Tensors, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "scale_factor": count(vision, "projector.scale_factor", 2),
        "vision_config": siglip_config(vision),
    }


def _preprocessor(vision: dict[str, Any]) -> dict[str, Any]:
    tile = count(vision, "image_size")
    edge = count(vision, "preproc_image_size", _TILES_OF_EDGE * tile)
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": edge},
        "max_image_size": {"longest_edge": tile},
    }


NAME = "idefics3"
PROJECTOR = Projector(
    model_type="idefics3",
    decoders=("llama",),
    text="model.text_model.",
    layers=f"{_TOWER}.encoder.layers",
    inner=SIGLIP,
    outer={
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
        "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{_TOWER}.post_layernorm",
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    activation="use_gelu",
    keys=("projector.scale_factor", "preproc_image_size"),
    tokens={"image_token_id": "<image>"},
    config=_config,
    preprocessor=_preprocessor,
)
