"""``vision.onnx`` of SmolVLM and SmolVLM2: the graph of Idefics3. Frames of videos are one tile each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import RawConfig
from ..image_processor import video_settings
from . import idefics3
from .idefics3 import Processor as Processor
from .idefics3 import vision_model as vision_model

_VIDEO = "<video>"  # what the chat template writes


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    processor = idefics3.image_processor(content, folder, raw)
    settings = video_settings(folder)
    sampling = settings.get("video_sampling") or {}
    size = sampling.get("video_size") or settings.get("size") or {"longest_edge": 4 * 364}
    tile = settings.get("max_image_size") or {"longest_edge": processor.tile}
    if idefics3.longest_edge(tile, "max_image_size") != processor.tile:
        return processor  # the tower's positions are those of one size of tiles
    edge = idefics3.longest_edge(size, "size")
    return replace(processor, video_edge=edge, texts={**processor.texts, "video": _VIDEO})
