"""``vision.onnx`` of LLaVA-NeXT-Video: that of LLaVA-NeXT, with squares of patches of frames that join.

Source: https://llava-vl.github.io/blog/2024-04-30-llava-next-video/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig, integer
from ..image_processor import token_text, video_settings
from ..weights import Checkpoint
from . import llava, llava_next

_IMAGE, _VIDEO = 32_001, 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(llava.Processor):
    """As in LLaVA-NeXT; the states of a frame are means of those of squares of patches.

    Args:
        pool: patches along an edge of such a square.
    """

    pool: int

    def check(self) -> None:
        llava.Processor.check(self)
        self.check_sizes("pool")
        if self.tile // self.patch % self.pool:
            raise ValueError(
                f"tiles of {self.tile // self.patch} patches along an edge do not hold squares of {self.pool}"
            )


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    raw = {"image_token_index": _IMAGE, **raw}
    name, pool = "llava_next_video", _pool(raw)
    processor = llava_next.processor_of_tiles(content, folder, raw, name, kind=Processor, pool=pool)
    settings = video_settings(folder)
    size, crop = settings.get("size", {}), settings.get("crop_size", {})
    edges = {*(size.values() if isinstance(size, dict) else [size])}
    edges |= {*(crop.values() if isinstance(crop, dict) else [crop])}
    if edges != {processor.tile} or settings.get("do_center_crop", True) is not True:
        return processor  # the tower's positions are those of one size of tiles
    token = integer(raw, "video_token_id", integer(raw, "video_token_index", _VIDEO))
    texts = {**processor.texts, "video": token_text(folder, token)}
    return dataclasses.replace(processor, texts=texts, video_token_id=token)


def vision_model(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the graph; see ``llava.vision_model``. A token is the mean of the patches of a square.

    A token of a picture is one patch, given as often as a square has patches: the mean is its state.
    """
    return llava.vision_model(raw, checkpoint, joined=_pool(raw) ** 2)


def _pool(raw: RawConfig) -> int:
    """Return how many patches along an edge become a token of a frame.

    Raises:
        UnsupportedModelError: they do not become their mean.
    """
    if (mode := raw.get("spatial_pool_mode", "average")) != "average":
        raise UnsupportedModelError(f"'spatial_pool_mode' '{mode}' is not supported; supported: average")
    return integer(raw, "spatial_pool_stride", 2)
