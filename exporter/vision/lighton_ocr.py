"""``vision.onnx`` of LightOnOCR: the graph of Mistral 3; no tokens of text end the rows of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import RawConfig, integer
from ..weights import Checkpoint
from . import mistral3
from .mistral3 import Processor as Processor

_IMAGE_TOKEN_ID = 151_655


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    raw = {**raw, "image_token_id": integer(raw, "image_token_id", _IMAGE_TOKEN_ID)}
    processor = mistral3.image_processor(content, folder, raw)
    edge, size = processor.patch * processor.merge, content.get("patch_size", 16)
    # Here the processor of transformers takes the size of this file.
    if size not in (edge, {"height": edge, "width": edge}):
        raise UnsupportedModelError(
            f"'patch_size' {size!r} is not supported; supported: that of a token, {edge}"
        )
    return replace(processor, ends=False, texts={"image": processor.texts["image"]})


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph, with lazily read weights; see ``mistral3.vision_model``."""
    raw = {**raw, "projector_hidden_act": "gelu", "multimodal_projector_bias": False}
    return mistral3.tower_model(raw, checkpoint, ("model.vision_encoder", "model.vision_projection"))
