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
    height, width, _ = pixels.shape
    counts = (processor.min_tiles, processor.max_tiles)
    columns, rows = (1, 1) if processor.max_tiles == 1 else best_grid(height, width, processor.tile, counts)
    units = tiles(processor, pixels, rows, columns)
    texts = processor.texts
    places = texts["image"] * (len(units) * processor.tile_tokens)
    return Prepared(units, f"{texts['start']}{places}{texts['end']}", grid=(rows, columns))


def tiles(processor: Processor, pixels: Pixels, rows: int, columns: int) -> list[Values]:
    """Return the tiles of a picture, row by row, then the whole picture in one tile if there are several."""
    edge = processor.tile
    cut = cut_tiles(pixels, (rows, columns), edge, processor.resample)
    return cut if len(cut) == 1 else [*cut, resized(pixels, edge, edge, processor.resample)]


def cut_tiles(pixels: Pixels, grid: tuple[int, int], edge: int, resample: int) -> list[Values]:
    """Resize a picture to a grid of rows and columns of square tiles, and return these row by row."""
    rows, columns = grid
    large = resized(pixels, rows * edge, columns * edge, resample)
    return [
        large[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]


def resized(pixels: Pixels, height: int, width: int, resample: int) -> Values:
    """Return a picture in another size; ``resample`` is the filter, in the numbers of Pillow."""
    from PIL import Image

    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)), np.uint8)


def best_grid(height: int, width: int, tile: int, counts: tuple[int, int]) -> tuple[int, int]:
    """Return the columns and rows whose aspect ratio is nearest to that of a picture.

    Of grids with equal ratios the largest is taken that has less than twice the pixels of the picture.

    Args:
        height: pixels of the picture.
        width: the same.
        tile: pixels of an edge of a tile.
        counts: the fewest and the most tiles.
    """
    best, nearest = (1, 1), float("inf")
    for columns, rows in _grids(*counts):
        difference = abs(width / height - columns / rows)
        large = height * width > 0.5 * tile**2 * columns * rows
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
