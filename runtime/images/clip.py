"""The geometry of CLIP (https://arxiv.org/abs/2103.00020): the middle of a picture in one square tile.

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.clip import Processor
from .llava import middle
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return the middle of a picture."""
    return Prepared([middle(pixels, processor.tile, processor.resample)], "")


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, whose vector is the state of a patch of zeros."""
    patches = square_patches(normalized(processor, unit), processor.patch)
    patches = np.concatenate([np.zeros((1, patches.shape[1]), np.float32), patches])
    numbers = np.arange(len(patches))
    return UnitInputs(patches, numbers[:1, None], {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})
