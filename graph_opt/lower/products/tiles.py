"""Pack blocked weights into tiles of 16 outputs, the layout of carryall's own kernels.

The layout, version 2, is described in ``providers/native/sources/layout.h``: kernels of every instruction set
read it as it is stored, for any number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...graph.lazy import Array
    from .groups import GroupedScales

LAYOUT = 2
COLUMNS = 16  # outputs of a tile
BLOCKS = (16, 32, 64, 128, 256)
MIDDLE, ZERO_POINTS, MINIMA = 0, 1, 2  # what the unsigned values are relative to
_NEAR = 1 << 17  # bytes of values that stay in the second-level cache while they are packed


def tile_bytes(inputs: int, bits: int, block_size: int, offsets: int, group_size: int = 0) -> int:
    """Return the bytes of one tile."""
    blocks = -(-inputs // block_size)
    factors = 0 if group_size else 128 if offsets == MINIMA else 64
    end = blocks * (COLUMNS * block_size * bits // 8 + factors)
    if group_size:
        end += -(-blocks * block_size // group_size) * 64 + blocks * COLUMNS
    if offsets == ZERO_POINTS:
        end += blocks * COLUMNS
    return -(-end // 64) * 64


def pack_tiles(
    values: Array,
    scales: Array,
    zero_points: Array | None = None,
    minima: Array | None = None,
    *,
    bits: int,
    groups: GroupedScales | None = None,
) -> Array:
    """Return the tiles of a weight, uint8 [tiles, bytes].

    Args:
        values: unsigned, [outputs, blocks, block_size * bits / 8]; of two 4-bit values the first is the low
            nibble.
        scales: float32 [outputs, blocks].
        zero_points: uint8 [outputs, blocks]; None is the middle of the range, or 0 with minima.
        minima: float32 [outputs, blocks], added to each value of a block.
        bits: 4 or 8.
        groups: the same scales as multiples of those of groups of blocks.
    """
    outputs, blocks = values.shape[:2]
    offsets = MINIMA if minima is not None else MIDDLE if zero_points is None else ZERO_POINTS
    block_size = values.shape[2] * 8 // bits
    group_size = 0 if groups is None else groups.group_size
    tiles = np.zeros(
        (-(-outputs // COLUMNS), tile_bytes(blocks * block_size, bits, block_size, offsets, group_size)),
        np.uint8,
    )
    value_bytes = COLUMNS * block_size * bits // 8
    block_bytes = value_bytes + (0 if group_size else 128 if offsets == MINIMA else 64)
    # A tile holds COLUMNS outputs. Of each block it has the values, then its scales and minima, in lines of
    # 64 bytes, so that a kernel reads one stream in the order in which it computes. Scales in groups and
    # zero points take less than a line a block: they stand behind all blocks.
    end = blocks * block_bytes
    inner = tiles[:, :end].view(np.uint32).reshape(len(tiles), blocks, -1, COLUMNS)
    lines = value_bytes // 64
    _write_values(inner[:, :, :lines], values, bits)
    factors = () if groups else ((lines, scales), (lines + 1, minima))
    for line, factor in factors:
        if factor is not None:
            floats = factor.astype(np.float32, copy=False)[..., None]
            inner[:, :, line : line + 1] = _by_tile(floats).view(np.uint32)
    for part in (*((groups.scales, groups.multiples) if groups else ()), zero_points):
        if part is not None:
            stored = np.ascontiguousarray(_by_tile(part[..., None])).view(np.uint8).reshape(len(tiles), -1)
            tiles[:, end : end + stored.shape[1]] = stored
            end += stored.shape[1]
    return tiles


def _write_values(target: Array, values: Array, bits: int) -> None:
    """Write values as uint32 into ``target`` [tiles, blocks, lines, 16], some tiles at a time."""
    words = np.ascontiguousarray(values).reshape(*values.shape[:2], -1).view(np.uint32)
    step = max(1, _NEAR // (words[:1].nbytes * COLUMNS))
    for tile in range(0, len(target), step):
        some = words[tile * COLUMNS : (tile + step) * COLUMNS]
        target[tile : tile + step] = _by_tile(_interleaved(some) if bits == 4 else some)


def _interleaved(words: Array) -> Array:
    """Return words of 8 values of 4 bits with the values i and i + 4 in byte i, i from 0 to 3."""
    mixed = _spread(words & 0xFFFF)
    mixed |= _spread(words >> 16) << 4
    return mixed


def _spread(words: Array) -> Array:
    """Move each 4 of the low 16 bits into the low half of a byte."""
    words |= words << 8
    words &= 0x00FF00FF
    words |= words << 4
    words &= 0x0F0F0F0F
    return words


def _by_tile(array: Array) -> Array:
    """Return [tiles, blocks, n, 16] of [outputs, blocks, n], padded with zeros."""
    missing = -len(array) % COLUMNS
    if missing:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    return array.reshape(-1, COLUMNS, *array.shape[1:]).transpose(0, 2, 3, 1)
