"""The geometry of LLaVA-NeXT-Video: pictures as in LLaVA-NeXT, frames in one tile with fewer tokens.

Source: https://llava-vl.github.io/blog/2024-04-30-llava-next-video/.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ...exporter.vision.llava_next_video import Processor
from . import llava
from .llava_next import prepare as prepare
from .units import Prepared, UnitInputs, Values, merged_squares
from .video import Video


def prepare_video(processor: Processor, video: Video) -> Prepared:
    """Return a video in a tile for each frame: its middle, whose shorter edge fits."""
    units = [llava.middle(frame, processor.tile, processor.resample)[None] for frame in video.frames]
    each = (processor.tile // processor.patch // processor.pool) ** 2
    rows = np.arange(len(units) * each)
    return Prepared(units, processor.texts["video"] * len(rows), rows)


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile [height, width, 3], or a frame [1, ...]."""
    is_frame = unit.ndim == 4
    alone = llava.inputs(processor, unit[0] if is_frame else unit)
    if not is_frame:
        return dataclasses.replace(alone, merged=np.repeat(alone.merged, processor.pool**2, axis=1))
    side = processor.tile // processor.patch
    return dataclasses.replace(alone, merged=alone.merged[:, 0][merged_squares(side, side, processor.pool)])
