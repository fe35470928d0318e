"""The geometry of PaddleOCR-VL: that of Qwen2-VL, with patches row by row and no picture below a token.

Source: https://arxiv.org/abs/2510.14528. The results equal those of transformers' processor on Pillow, bit
for bit.
"""

from __future__ import annotations

import numpy as np

from ...contract import GROUPS, PATCH_COS, PATCH_SIN, TABLE_ROWS, TABLE_WEIGHTS
from ...exporter.vision.paddleocr_vl import Processor
from . import qwen2_vl
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size that the tower sees, with its text and the places of its tokens."""
    height, width = resized(processor, pixels.shape[0], pixels.shape[1])
    return qwen2_vl.prepared(processor, pixels, height, width)


def resized(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return height and width in whole tokens; a picture of less than a token is enlarged before."""
    token = processor.patch * processor.merge
    if height < token:
        height, width = token, round(width * token / height)
    if width < token:
        height, width = round(height * token / width), token
    return qwen2_vl.resized(processor, height, width)


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a picture; patches are row by row."""
    rows, columns = unit.shape[0] // processor.patch, unit.shape[1] // processor.patch
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    cos, sin = qwen2_vl.turns(processor, row, column)
    entries, weights = qwen2_vl.table(processor.positions, (row, rows), (column, columns), corners=False)
    return UnitInputs(
        square_patches(normalized(processor, unit), processor.patch),
        merged_squares(rows, columns, processor.merge),
        {GROUPS: [np.arange(rows * columns)]},
        {PATCH_COS: cos, PATCH_SIN: sin, TABLE_ROWS: entries, TABLE_WEIGHTS: weights},
    )
