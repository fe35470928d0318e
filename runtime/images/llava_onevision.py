"""The geometry of LLaVA-OneVision: that of LLaVA-NeXT, with fewer tokens of many tiles.

Source: https://arxiv.org/abs/2408.03326. Pixels equal those of transformers on Pillow, bit for bit.
In a conversation with several pictures each is padded to a square and is one tile.
"""

from __future__ import annotations

import math

import numpy as np

from ...exporter.vision.llava_onevision import Processor
from .llava import inputs as inputs
from .llava import padded
from .llava_next import tiles, unpadded_rows
from .opening import Pixels
from .units import Floats, Ids, Prepared

_MOST = 1.1  # states are interpolated if both edges would shrink by more


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return the only picture of a conversation in tiles, with its text and the order of its rows."""
    units, grid = tiles(processor, pixels)
    side = processor.tile // processor.patch
    joined = unpadded_rows(processor, grid, (pixels.shape[0], pixels.shape[1]))
    height, width = joined.shape
    shrink = math.sqrt(height * width / (processor.most_tiles * side**2))
    size = (height, width) if shrink <= _MOST else (int(height // shrink), int(width // shrink))
    rows, weights = _interpolated(joined, size)
    first = np.zeros((side * side, 4), np.int64)
    first[:, 0] = np.arange(side * side)
    alone = np.zeros(first.shape, np.float32)
    alone[:, 0] = 1
    rows, weights = np.concatenate([first, rows]), np.concatenate([alone, weights])
    return Prepared(units, processor.texts["image"] * len(rows), rows, weights=weights, grid=grid)


def prepare_several(processor: Processor, pixels: Pixels) -> Prepared:
    """Return one of several pictures of a conversation, in one tile."""
    from PIL import Image

    edge, count = processor.tile, (processor.tile // processor.patch) ** 2
    square = Image.fromarray(padded(processor, pixels))
    tile = np.array(square.resize((edge, edge), Image.Resampling(processor.resample)), np.uint8)
    rows = np.append(np.arange(count), -1)
    return Prepared([tile], processor.texts["image"] * len(rows), rows)


def _interpolated(joined: Ids, size: tuple[int, int]) -> tuple[Ids, Floats]:
    """Return rows and weights [tokens, 4] of a grid of rows in another size, each of its rows ended by -1."""
    (top, above), (left, beside) = (_taps(old, new) for old, new in zip(joined.shape, size, strict=True))
    rows = joined[top[:, None, :, None], left[None, :, None, :]].reshape(*size, 4)
    weights = (above[:, None, :, None] * beside[None, :, None, :]).reshape(*size, 4)
    ends = np.full((size[0], 1, 4), -1)
    last = np.zeros((size[0], 1, 4), np.float32)
    last[:, :, 0] = 1
    rows, weights = np.concatenate([rows, ends], axis=1), np.concatenate([weights, last], axis=1)
    return np.asarray(rows.reshape(-1, 4), np.int64), np.asarray(weights.reshape(-1, 4), np.float32)


def _taps(old: int, new: int) -> tuple[Ids, Floats]:
    """Return two entries and their weights for each place of an axis; the middles of places are aligned."""
    places = np.maximum((np.arange(new, dtype=np.float32) + 0.5) * np.float32(old / new) - 0.5, 0)
    first = np.floor(places).astype(np.int64)
    second = np.minimum(first + 1, old - 1)
    weight = (places - first).astype(np.float32)
    return np.stack([first, second], axis=1), np.stack([1 - weight, weight], axis=1)
