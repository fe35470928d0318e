"""The geometry of LLaVA 1.5: the middle of a picture, or the padded picture, in one square tile.

Source: https://arxiv.org/abs/2310.03744. The results equal those of transformers' processors on Pillow, bit
for bit.
"""

from __future__ import annotations

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.llava import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in one tile, with its text."""
    if processor.pads:
        pixels = padded(processor, pixels)
    tile = middle(pixels, processor.tile, processor.resample)
    return Prepared([tile], processor.texts["image"] * (processor.tile // processor.patch) ** 2)


def middle(pixels: Pixels, edge: int, resample: int) -> Values:
    """Return the middle of a picture whose shorter edge becomes ``edge``, uint8 [edge, edge, 3]."""
    from PIL import Image

    height, width, _ = pixels.shape
    if height <= width:
        height, width = edge, int(edge * width / height)
    else:
        height, width = int(edge * height / width), edge
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    top, left = (height - edge) // 2, (width - edge) // 2
    return np.array(image, np.uint8)[top : top + edge, left : left + edge]


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, which is one group.

    A state of the whole tile is in front of those of the patches, where the tower has one; no token is made
    of it.
    """
    patches = square_patches(normalized(processor, unit), processor.patch)
    count = len(patches)
    if processor.class_token:
        patches = np.concatenate([np.zeros((1, patches.shape[1]), np.float32), patches])
    numbers = np.arange(len(patches))
    return UnitInputs(patches, numbers[-count:, None], {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})


def padded(processor: Processor, pixels: Pixels) -> Pixels:
    """Return a picture in the middle of a square of the mean colour."""
    height, width, _ = pixels.shape
    if height == width:
        return pixels
    edge = max(height, width)
    square = np.empty((edge, edge, 3), np.uint8)
    square[:] = [int(mean * 255) for mean in processor.mean]
    top, left = (edge - height) // 2, (edge - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square
