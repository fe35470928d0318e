"""The geometry of Pixtral and Mistral 3: a picture is one unit of whole tokens, with an end of each row.

Source: https://arxiv.org/abs/2410.07073. The results equal those of transformers' processor on Pillow, bit
for bit.
"""

from __future__ import annotations

import math

import numpy as np

from ...contract import GROUPS, PATCH_COS, PATCH_SIN
from ...exporter.vision.mistral3 import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size that the tower sees, with its text."""
    from PIL import Image

    height, width = resized(processor, pixels.shape[0], pixels.shape[1])
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(processor.resample))
    token, texts = processor.patch * processor.merge, processor.texts
    rows, columns = height // token, width // token
    row = texts["image"] * columns
    text = texts["break"].join([row] * rows) + texts["end"] if processor.ends else row * rows
    return Prepared([np.array(image, np.uint8)], text)


def resized(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return height and width in whole tokens; a picture is shrunk to the longest edge, never enlarged."""
    token = processor.patch * processor.merge
    ratio = max(height / processor.longest_edge, width / processor.longest_edge)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    # A side of less than a pixel makes one token.
    return max(1, (height - 1) // token + 1) * token, max(1, (width - 1) // token + 1) * token


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a picture; patches are row by row."""
    rows, columns = unit.shape[0] // processor.patch, unit.shape[1] // processor.patch
    exponents = np.arange(0, processor.rotary, 2, dtype=np.float32) / np.float32(processor.rotary)
    frequencies = (1.0 / np.float32(processor.theta) ** exponents).astype(np.float32)
    # Every other frequency turns with the row, those between with the column.
    places = np.divmod(np.arange(rows * columns), columns)
    angles = [axis[:, None].astype(np.float32) * frequencies[first::2] for first, axis in enumerate(places)]
    turns = np.concatenate(angles, axis=1)
    return UnitInputs(
        square_patches(normalized(processor, unit), processor.patch),
        merged_squares(rows, columns, processor.merge),
        {GROUPS: [np.arange(rows * columns)]},
        {PATCH_COS: np.cos(turns), PATCH_SIN: np.sin(turns)},
    )
