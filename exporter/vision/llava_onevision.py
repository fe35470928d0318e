"""``vision.onnx`` of LLaVA-OneVision: the graph of LLaVA-NeXT, with a SigLIP tower.

Source: https://arxiv.org/abs/2408.03326.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModelError
from ...records import dataclass
from ..config import RawConfig
from ..image_processor import check_processor
from . import llava
from .llava import vision_model as vision_model

_EDGES = range(384, 2305, 384)
_RESOLUTIONS = [[height, width] for height in _EDGES for width in _EDGES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor(llava.Processor):
    """As in LLaVA-NeXT; the states of many tiles are interpolated to fewer.

    Args:
        most_tiles: tiles whose tokens a picture has at most, beside those of the whole picture.
    """

    most_tiles: int

    def check(self) -> None:
        llava.Processor.check(self)
        self.check_sizes("most_tiles")


def image_processor(content: Mapping[str, Any], folder: Path, raw: RawConfig) -> Processor:
    """Return the processor of a checkpoint; see ``exporter.image_processor.image_processor``."""
    check_processor(content, ("LlavaOnevisionImageProcessor",), ("do_resize", "do_rescale", "do_normalize"))
    resolutions = content.get("image_grid_pinpoints", _RESOLUTIONS)
    if resolutions != raw.get("image_grid_pinpoints", _RESOLUTIONS):
        raise UnsupportedModelError("'image_grid_pinpoints' differ from those of config.json")
    ratio = str(raw.get("vision_aspect_ratio", "anyres_max_9"))
    if re.fullmatch(r"anyres_max_[0-9]{1,4}", ratio) is None:
        raise UnsupportedModelError(
            f"'vision_aspect_ratio' '{ratio}' is not supported; supported: anyres_max_N"
        )
    return llava.processor_of(
        content,
        folder,
        {"image_token_index": 151_646, **raw},
        "llava_onevision",
        kind=Processor,
        resolutions=tuple(tuple(size) for size in resolutions),
        most_tiles=int(ratio.rpartition("_")[2]),
    )
