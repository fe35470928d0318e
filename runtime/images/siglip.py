"""The geometry of SigLIP (https://arxiv.org/abs/2303.15343): the whole picture in one square tile.

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.siglip import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size of a tile, whatever its aspect ratio."""
    return Prepared([squared(pixels, processor.tile, processor.resample)], "")


def squared(pixels: Pixels, edge: int, resample: int) -> Values:
    """Return a picture as a square, uint8 [edge, edge, 3]."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.array(image.resize((edge, edge), Image.Resampling(resample)), np.uint8)


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, all of whose patches make its vector."""
    patches = square_patches(normalized(processor, unit), processor.patch)
    numbers = np.arange(len(patches))
    return UnitInputs(patches, numbers[None], {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})
