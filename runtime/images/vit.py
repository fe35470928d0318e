"""The geometry of ViT and DeiT as encoders of a decoder: a picture in one square tile, or its middle.

The results equal those of transformers' processors of ViT and DeiT on Pillow, bit for bit.
"""

from __future__ import annotations

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.vit import Processor
from .opening import Pixels
from .siglip import squared
from .units import Prepared, UnitInputs, Values, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size of a tile, whatever its aspect ratio."""
    whole, edge = squared(pixels, processor.resized, processor.resample), processor.tile
    first = (processor.resized - edge) // 2
    return Prepared([whole[first : first + edge, first : first + edge]], "")


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, of which each patch and each token is a row."""
    patches = square_patches(normalized(processor, unit), processor.patch)
    extra = np.zeros((processor.extra, patches.shape[1]), np.float32)
    patches = np.concatenate([extra, patches])
    numbers = np.arange(len(patches))
    return UnitInputs(patches, numbers[:, None], {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})
