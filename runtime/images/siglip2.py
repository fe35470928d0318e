"""The geometry of SigLIP 2 (https://arxiv.org/abs/2502.14786): pictures of their own aspect ratio (NaFlex).

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np

from ...contract import GROUPS, POSITION_WEIGHTS
from ...exporter.vision.siglip2 import Processor
from .opening import Pixels
from .units import Floats, Ids, Prepared, UnitInputs, Values, normalized

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
    """Return the inputs of ``vision.onnx`` for a picture, all of whose patches are joined."""
    count = unit.shape[0] // processor.patch * (unit.shape[1] // processor.patch)
    values, merged = normalized(processor, unit), np.arange(count)[None]
    return patch_inputs(values, processor.patch, processor.positions, merged)


def patch_inputs(values: Floats, edge: int, positions: int, merged: Ids) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a unit; patches are [height, width, channels].

    Args:
        values: [3, height, width].
        edge: pixels of an edge of a patch.
        positions: entries along an edge of the tower's table of positions.
        merged: [tokens, k], the patches that each token joins.
    """
    rows, columns = values.shape[1] // edge, values.shape[2] // edge
    cut = values.reshape(3, rows, edge, columns, edge).transpose(1, 3, 2, 4, 0)
    patches = np.ascontiguousarray(cut.reshape(rows * columns, -1), np.float32)
    weights = position_weights(positions, rows, columns)
    groups = {GROUPS: [np.arange(len(patches))]}
    return UnitInputs(patches, merged, groups, {POSITION_WEIGHTS: weights})


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
