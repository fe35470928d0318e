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
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image = image.resize((processor.tile, processor.tile), Image.Resampling(processor.resample))
    return Prepared([np.array(image, np.uint8)], "")


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, all of whose patches make its vector."""
    patches = square_patches(normalized(processor, unit), processor.patch)
    numbers = np.arange(len(patches))
    return UnitInputs(patches, numbers[None], {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})
