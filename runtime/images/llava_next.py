"""The geometry of LLaVA-NeXT: the whole picture in one tile, and the picture in tiles of the best resolution.

Source: https://llava-vl.github.io/blog/2024-01-30-llava-next/. The results equal those of transformers'
processor on Pillow, bit for bit.
"""

from __future__ import annotations

import math

import numpy as np

from ...exporter.vision.llava import Processor
from .llava import inputs as inputs
from .opening import Pixels
from .units import Ids, Prepared, Values


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in tiles, with its text and the order of its rows."""
    units, grid = tiles(processor, pixels)
    rows = _rows(processor, grid, (pixels.shape[0], pixels.shape[1]))
    return Prepared(units, processor.texts["image"] * len(rows), rows, grid=grid)


def tiles(processor: Processor, pixels: Pixels) -> tuple[list[Values], tuple[int, int]]:
    """Return the whole picture in one tile, then the tiles of the padded picture by rows, and their grid."""
    from PIL import Image

    resample, edge = Image.Resampling(processor.resample), processor.tile
    image = Image.fromarray(pixels)
    size = (pixels.shape[0], pixels.shape[1])
    canvas = best_resolution(size, processor.resolutions)
    height, width = fitted(size, canvas)
    small = np.array(image.resize((width, height), resample), np.uint8)
    padded = np.zeros((*canvas, 3), np.uint8)
    top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
    padded[top : top + height, left : left + width] = small
    rows, columns = canvas[0] // edge, canvas[1] // edge
    cut = [
        padded[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]
    return [np.array(image.resize((edge, edge), resample), np.uint8), *cut], (rows, columns)


def best_resolution(size: tuple[int, int], resolutions: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the resolution that keeps most pixels of a picture, of those the one that wastes fewest."""
    height, width = size

    def kept(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - resolution[0] * resolution[1]

    return max(resolutions, key=kept)  # the first of equal ones


def fitted(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a picture in a canvas that touches two opposite edges of it."""
    tall, wide = canvas[0] / size[0], canvas[1] / size[1]
    if wide < tall:
        return min(math.ceil(size[0] * wide), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(size[1] * tall), canvas[1])


def unpadded(grid: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of tokens on each side that hold padding only."""
    rows, columns = grid
    height, width = size
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def unpadded_rows(processor: Processor, grid: tuple[int, int], size: tuple[int, int]) -> Ids:
    """Return the rows [rows, columns] of all tiles as one grid, without those that hold padding only."""
    side = processor.tile // processor.patch
    each = side * side
    numbers = each + np.arange(grid[0] * grid[1] * each).reshape(*grid, side, side)
    joined = numbers.transpose(0, 2, 1, 3).reshape(grid[0] * side, grid[1] * side)
    above, beside = unpadded((joined.shape[0], joined.shape[1]), size)
    return joined[above : joined.shape[0] - above, beside : joined.shape[1] - beside]


def _rows(processor: Processor, grid: tuple[int, int], size: tuple[int, int]) -> Ids:
    """Return the order of rows: those of the whole picture, then each row of all tiles and its end."""
    first = np.arange((processor.tile // processor.patch) ** 2)
    joined = unpadded_rows(processor, grid, size)
    ended = np.concatenate([joined, np.full((len(joined), 1), -1)], axis=1)
    return np.asarray(np.concatenate([first, ended.reshape(-1)]), np.int64)
