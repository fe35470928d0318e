"""The geometry of InternVL 3: a picture in tiles of the nearest aspect ratio, then the whole picture in one.

Source: https://arxiv.org/abs/2404.16821, section 3.2. The results equal those of transformers' processor on
Pillow, bit for bit.
"""

from __future__ import annotations

import functools

import numpy as np

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.internvl import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in tiles, with its text."""
    columns, rows = (1, 1) if processor.max_tiles == 1 else best_grid(processor, *pixels.shape[:2])
    units = tiles(processor, pixels, rows, columns)
    texts = processor.texts
    places = texts["image"] * (len(units) * processor.tile_tokens)
    return Prepared(units, f"{texts['start']}{places}{texts['end']}", grid=(rows, columns))


def tiles(processor: Processor, pixels: Pixels, rows: int, columns: int) -> list[Values]:
    """Return the tiles of a picture, row by row, then the whole picture in one tile if there are several."""
    from PIL import Image

    resample, edge = Image.Resampling(processor.resample), processor.tile
    image = Image.fromarray(pixels)
    large = np.array(image.resize((columns * edge, rows * edge), resample), np.uint8)
    cut = [
        large[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]
    return cut if len(cut) == 1 else [*cut, np.array(image.resize((edge, edge), resample), np.uint8)]


def best_grid(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return the columns and rows whose aspect ratio is nearest to that of a picture.

    Of grids with equal ratios the largest is taken that has less than twice the pixels of the picture.
    """
    best, nearest = (1, 1), float("inf")
    for columns, rows in _grids(processor.min_tiles, processor.max_tiles):
        difference = abs(width / height - columns / rows)
        large = height * width > 0.5 * processor.tile**2 * columns * rows
        if difference < nearest or (difference == nearest and large):
            best, nearest = (columns, rows), difference
    return best


@functools.lru_cache(maxsize=8)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return all grids of ``least`` to ``most`` tiles, smaller ones first."""
    sides = range(1, most + 1)
    found = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, which is one group.

    A state of the whole tile is in front of those of the patches; no token is made of it.
    """
    patches = square_patches(normalized(processor, unit), processor.patch)
    side = processor.tile // processor.patch
    numbers = np.arange(len(patches) + 1)
    patches = np.concatenate([np.zeros((1, patches.shape[1]), np.float32), patches])
    merged = merged_squares(side, side, processor.merge) + 1
    return UnitInputs(patches, merged, {GROUPS: [numbers]}, {PATCH_POSITIONS: numbers})
