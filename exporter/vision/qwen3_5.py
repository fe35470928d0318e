"""``vision.onnx`` of Qwen 3.5 and later: the tower of Qwen3-VL, of which only the last layer is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..config import RawConfig, mapping
from ..weights import Checkpoint
from . import qwen3_vl
from .qwen3_vl import Processor as Processor

_IMAGE_TOKEN_ID = 248_056


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    return qwen3_vl.image_processor(content, folder, _without_deep_layers(raw))


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``qwen3_vl.vision_model``."""
    return qwen3_vl.vision_model(_without_deep_layers(raw), checkpoint)


def _without_deep_layers(raw: RawConfig) -> RawConfig:
    vision = {**mapping(raw, "vision_config"), "deepstack_visual_indexes": []}
    return {"image_token_id": _IMAGE_TOKEN_ID, **raw, "vision_config": vision}
