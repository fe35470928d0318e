"""The geometry of SigLIP 2 (https://arxiv.org/abs/2502.14786): pictures of their own aspect ratio (NaFlex).

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np

from ...contract import GROUPS, POSITION_WEIGHTS
from ...exporter.vision.siglip2 import Processor
from .opening import Pixels
from .units import Floats, Prepared, UnitInputs, Values, normalized

_NEAR = 1e-5  # of the scale that is searched, as in transformers
_LARGEST_SCALE = 100.0


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the largest size whose patches are not too many."""
    from PIL import Image

    height, width = size(processor, pixels.shape[0], pixels.shape[1])
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return Prepared(
        [np.array(image.resize((width, height), Image.Resampling(processor.resample)), np.uint8)], ""
    )


def size(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return the height and width in pixels that a picture is resized to, whole patches.

    The scale is found by bisection; each edge is rounded up to whole patches.
    """

    def patches(scale: float) -> tuple[int, int]:
        counts = [max(1, math.ceil(edge * scale / processor.patch)) for edge in (height, width)]
        return counts[0], counts[1]

    least, most = _NEAR / 10, _LARGEST_SCALE
    while most - least >= _NEAR:
        scale = (least + most) / 2
        if math.prod(patches(scale)) <= processor.most_patches:
            least = scale
        else:
            most = scale
    rows, columns = patches(least)
    return rows * processor.patch, columns * processor.patch


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a picture; patches are [height, width, channels]."""
    edge = processor.patch
    rows, columns = unit.shape[0] // edge, unit.shape[1] // edge
    cut = normalized(processor, unit).reshape(3, rows, edge, columns, edge).transpose(1, 3, 2, 4, 0)
    patches = np.ascontiguousarray(cut.reshape(rows * columns, -1), np.float32)
    numbers = np.arange(len(patches))
    weights = position_weights(processor.positions, rows, columns)
    return UnitInputs(patches, numbers[None], {GROUPS: [numbers]}, {POSITION_WEIGHTS: weights})


def position_weights(entries: int, rows: int, columns: int) -> Floats:
    """Return the part of each entry of a square table in the position of each patch.

    The table is resized bilinearly to [rows, columns], smoothed where it shrinks: along an edge, an entry
    counts by its distance from the place of the patch, relative to the step between patches if that is
    larger than one entry.

    Returns:
        float32 [rows * columns, entries * entries].
    """
    along = []
    for count in (rows, columns):
        step = np.float32(entries) / np.float32(count)
        places = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * step - np.float32(0.5)
        far = np.abs(np.arange(entries, dtype=np.float32) - places[:, None]) / max(step, np.float32(1))
        weights = np.maximum(1 - far, 0)
        along.append(weights / weights.sum(1, keepdims=True))
    both = along[0][:, None, :, None] * along[1][None, :, None, :]
    return np.ascontiguousarray(both.reshape(rows * columns, entries * entries), np.float32)
