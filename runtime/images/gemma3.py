"""The geometry of Gemma 3: the whole picture in one square tile, and crops of long ones (pan and scan).

Source: https://arxiv.org/abs/2503.19786, section 2.1. The results equal those of transformers' processor on
Pillow, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.gemma3 import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized, square_patches

_WHOLE, _CROPS = "Here is the original image ", " and here are some crops to help you see better "


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in tiles, the whole one first, with its text."""
    texts = processor.texts
    tile = f"\n\n{texts['place']}{texts['image'] * processor.tile_tokens}{texts['end']}\n\n"
    cut = crops(processor, pixels)
    text = f"{_WHOLE}{tile}{_CROPS}{' '.join([tile] * len(cut))}" if cut else tile
    return Prepared([_resized(processor, each) for each in (pixels, *cut)], text)


def crops(processor: Processor, pixels: Pixels) -> list[Pixels]:
    """Return the crops of a picture along its longer edge; none of a picture that is nearly square."""
    height, width = pixels.shape[:2]
    longer, shorter = max(height, width), min(height, width)
    if not processor.crops or longer / shorter < processor.crop_ratio:
        return []
    count = min(longer // processor.min_crop, math.floor(longer / shorter + 0.5))
    count = min(max(2, count), processor.max_crops)
    step = math.ceil(longer / count)
    if min(step, shorter) < processor.min_crop:
        return []
    starts = range(0, step * count, step)
    if width >= height:
        return [pixels[:, start : start + step] for start in starts]
    return [pixels[start : start + step] for start in starts]


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, which is one group; patches are row by row."""
    side = processor.tile // processor.patch
    count = np.arange(side * side, dtype=np.int64)
    return UnitInputs(
        square_patches(normalized(processor, unit), processor.patch),
        merged_squares(side, side, processor.merge),
        {GROUPS: [count]},
        {PATCH_POSITIONS: count},
    )


def _resized(processor: Processor, pixels: Pixels) -> Values:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    edge = processor.tile
    return np.array(image.resize((edge, edge), Image.Resampling(processor.resample)), np.uint8)
