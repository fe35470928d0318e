"""The geometry of Gemma 4: a picture is one unit of its aspect ratio, as large as a budget of tokens allows.

The results equal those of transformers' processor on Pillow, bit for bit. Patches are [height, width,
channels].
"""

from __future__ import annotations

import math

import numpy as np

from ...contract import GROUPS, PATCH_COS, PATCH_SIN, TABLE_ROWS
from ...exporter.vision.gemma4 import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size that the tower sees, with its text."""
    from PIL import Image

    height, width = resized(processor, pixels.shape[0], pixels.shape[1])
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(processor.resample))
    texts, token = processor.texts, processor.patch * processor.merge
    places = texts["image"] * (height // token * (width // token))
    return Prepared([np.array(image, np.uint8)], f"{texts['start']}{places}{texts['end']}")


def resized(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return the largest height and width in whole tokens within the budget, near the aspect ratio."""
    token = processor.patch * processor.merge
    patches = processor.max_tokens * processor.merge**2
    factor = math.sqrt(patches * processor.patch**2 / (height * width))
    tall, wide = (math.floor(factor * edge / token) * token for edge in (height, width))
    longest = processor.max_tokens * token
    # The shorter edge of a very long picture is one token.
    if not tall:
        return token, min(width // height * token, longest)
    if not wide:
        return min(height // width * token, longest), token
    return tall, wide


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a picture; patches are row by row."""
    size = processor.patch
    rows, columns = unit.shape[0] // size, unit.shape[1] // size
    cut = normalized(processor, unit).reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    half = processor.rotary // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = (np.float32(1) / np.float32(processor.theta) ** exponents).astype(np.float32)
    angles = [axis[:, None].astype(np.float32) * frequencies for axis in (column, row)]
    turns = np.concatenate(angles, axis=1)
    return UnitInputs(
        np.ascontiguousarray(cut.reshape(rows * columns, -1), np.float32),
        merged_squares(rows, columns, processor.merge),
        {GROUPS: [np.arange(rows * columns)]},
        {
            TABLE_ROWS: np.stack([column, processor.positions + row], axis=1),
            PATCH_COS: np.cos(turns),
            PATCH_SIN: np.sin(turns),
        },
    )
