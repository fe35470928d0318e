"""The geometry of LFM2-VL (https://arxiv.org/abs/2511.23404): small pictures whole, large ones in tiles.

Sizes, tiles and texts equal those of transformers' processor. It resizes with torchvision, and carryall with
Pillow: the filters are the same, and values differ by at most 1 of 255.
"""

from __future__ import annotations

import math

from ...exporter.vision.lfm2_vl import Processor
from .internvl import best_grid, cut_tiles, resized
from .opening import Pixels
from .siglip2 import patch_inputs
from .units import Prepared, UnitInputs, Values, merged_squares, normalized_at_once


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture whole or in tiles, with its text."""
    texts, (height, width, _) = processor.texts, pixels.shape
    counts = (processor.min_tiles, processor.max_tiles)
    grid = (1, 1)
    if not fits(processor, height, width):
        columns, rows = best_grid(height, width, processor.tile, counts)
        grid = (rows, columns)
    if grid == (1, 1):
        unit = whole(processor, pixels)
        return Prepared([unit], f"{texts['start']}{_places(processor, unit)}{texts['end']}")
    units = cut_tiles(pixels, grid, processor.tile, processor.resample)
    text = ""
    for number, unit in enumerate(units):
        row, column = divmod(number, grid[1])
        text += f"<|img_row_{row + 1}_col_{column + 1}|>{_places(processor, unit)}"
    if processor.whole:
        units.append(whole(processor, pixels))
        text += texts["whole"] + _places(processor, units[-1])
    return Prepared(units, f"{texts['start']}{text}{texts['end']}", grid=grid)


def _places(processor: Processor, unit: Values) -> str:
    tokens = math.prod(unit.shape[:2]) // (processor.patch * processor.merge) ** 2
    return processor.texts["image"] * tokens


def whole(processor: Processor, pixels: Pixels) -> Values:
    """Return a picture in the size in which it is not cut."""
    return resized(pixels, *whole_size(processor, *pixels.shape[:2]), processor.resample)


def fits(processor: Processor, height: int, width: int) -> bool:
    """Return whether a picture is not cut, by its pixels in whole tokens; an edge is at least a patch."""
    if processor.max_tiles == 1:
        return True
    token = processor.patch * processor.merge
    pixels = math.prod(max(processor.patch, round(edge / token) * token) for edge in (height, width))
    return pixels <= processor.max_tokens * token**2 * processor.tolerance


def whole_size(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return the height and width of a whole picture, in whole tokens, near the aspect ratio.

    Halves round to even numbers.
    """
    token = processor.patch * processor.merge
    rows, columns = (max(1, round(edge / token)) for edge in (height, width))
    if rows * columns > processor.max_tokens:
        shrink = math.sqrt((height * width) / (processor.max_tokens * token**2))
        rows, columns = (max(1, math.floor(edge / shrink / token)) for edge in (height, width))
    elif rows * columns < processor.min_tokens:
        growth = math.sqrt(processor.min_tokens * token**2 / (height * width))
        rows, columns = (math.ceil(edge * growth / token) for edge in (height, width))
    return rows * token, columns * token


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile or a whole picture, which is one group."""
    rows, columns = unit.shape[0] // processor.patch, unit.shape[1] // processor.patch
    values, merged = normalized_at_once(processor, unit), merged_squares(rows, columns, processor.merge)
    return patch_inputs(values, processor.patch, processor.positions, merged)
