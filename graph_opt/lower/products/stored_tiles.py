"""Tiles of weights that keep the blocks of a GGUF file: as many bytes as in the file, and the same values.

The layout is described in ``providers/native/sources/layout.h``. The target's own routine packs the tiles, in
slabs, from rows that are read as they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....storage.stored_tensor import StoredBlocks, StoredRows, StoredStack
from ...graph.lazy import SlabTensor
from ..kernels import StoredForm, TilePacker
from .tiles import COLUMNS

Bytes = npt.NDArray[np.uint8]
HALF_MIDDLE, HALF_MINIMA = 3, 4  # values of the attribute `offsets`: scales are float16, as in the file
HALF_CODES, EXPONENT_CODES = 7, 8  # values are numbers in a table; scales of the latter are powers of two
SHORT_GRID, LONG_GRID = 11, 12  # four magnitudes are a number in a table of 256 or 512, and signs
# Read and packed at a time. Larger slabs leave the caches and are new pages each time: 16 MB take twice.
_SLAB_BYTES = 2 << 20
# Scales and minima of an output; ninth bits and scales of 256 inputs are 12 bytes more with the long grid.
_SCALE_BYTES = {
    HALF_MIDDLE: 2,
    HALF_MINIMA: 4,
    HALF_CODES: 2,
    EXPONENT_CODES: 1,
    SHORT_GRID: 2,
    LONG_GRID: 14,
}

FORMS = {
    "Q4_0": StoredForm(4, 32, 0, HALF_MIDDLE),
    "Q4_1": StoredForm(4, 32, 0, HALF_MINIMA),
    "Q5_0": StoredForm(5, 32, 0, HALF_MIDDLE),
    "Q5_1": StoredForm(5, 32, 0, HALF_MINIMA),
    "Q8_0": StoredForm(8, 32, 0, HALF_MIDDLE),
    "Q2_K": StoredForm(2, 16, 256, HALF_MINIMA),
    "Q3_K": StoredForm(3, 16, 256, HALF_MIDDLE),
    "Q4_K": StoredForm(4, 32, 256, HALF_MINIMA),
    "Q5_K": StoredForm(5, 32, 256, HALF_MINIMA),
    "Q6_K": StoredForm(6, 16, 256, HALF_MIDDLE),
    "IQ4_NL": StoredForm(4, 32, 0, HALF_CODES),
    "IQ4_XS": StoredForm(4, 32, 256, HALF_CODES),
    "IQ3_XXS": StoredForm(3, 32, 256, SHORT_GRID),
    "IQ3_S": StoredForm(3, 32, 256, LONG_GRID),
    "MXFP4": StoredForm(4, 32, 0, EXPONENT_CODES),
}


def stored_tile_bytes(form: StoredForm, inputs: int) -> int:
    """Return the bytes of one tile."""
    stretch = form.group or form.block
    size = COLUMNS * (stretch * form.bits // 8 + _SCALE_BYTES[form.offsets])
    if form.group and form.offsets not in (SHORT_GRID, LONG_GRID):
        # Of 16 integers of 6 bits, or an integer of 8 for each block.
        sixes = form.bits == 3 or (form.offsets == HALF_MINIMA and form.block == 32)
        size += COLUMNS * (12 if sixes else form.group // form.block)
    return -(-(inputs // stretch * size) // 64) * 64


def stored_tiles(blocks: StoredBlocks, inputs: int, outputs: int, pack: TilePacker) -> SlabTensor:
    """Return the tiles of a weight, which are read and packed when they are written.

    Args:
        blocks: the weight; its type is one of ``FORMS``.
        inputs: weights of a row.
        outputs: rows.
        pack: the target's routine.
    """
    form = FORMS[blocks.type_name]
    step = max(1, _SLAB_BYTES // (blocks.parts[0].row_bytes * COLUMNS)) * COLUMNS

    def slabs() -> Iterator[Bytes]:
        for first in range(0, outputs, step):
            yield pack(form, list(_rows(blocks.parts, first, min(step, outputs - first))), inputs)

    return SlabTensor(slabs, (-(-outputs // COLUMNS), stored_tile_bytes(form, inputs)))


def stacked_tiles(stacks: Sequence[StoredStack], pack: TilePacker) -> SlabTensor:
    """Return the tiles of stacks of matrices, uint8 [matrices, tiles, bytes]; as ``stored_tiles``.

    Args:
        stacks: of one type and shape, whose outputs fill whole tiles. The matrices of one number follow each
            other.
        pack: the target's routine.
    """
    form, (count, outputs, inputs) = FORMS[stacks[0].type_name], stacks[0].shape
    step = max(1, _SLAB_BYTES // (len(stacks) * outputs * stacks[0].row_bytes))

    def slabs() -> Iterator[Bytes]:
        for first in range(0, count, step):
            some = min(step, count - first)
            read = [stack.rows(first * outputs, some * outputs) for stack in stacks]
            apart = [rows.reshape(some, outputs, -1) for rows in read]
            yield pack(form, [stack[number] for number in range(some) for stack in apart], inputs)

    tiles = len(stacks) * outputs // COLUMNS
    return SlabTensor(slabs, (count, tiles, stored_tile_bytes(form, inputs)))


def _rows(parts: Sequence[StoredRows], first: int, count: int) -> Iterator[Bytes]:
    """Yield some rows of a matrix of several parts, each read with those near it."""
    for part in parts:
        order = part.order[max(0, first) : max(0, first + count)]
        first -= len(part.order)
        if not len(order):
            continue
        low, end = int(order[0]), int(order[0]) + len(order)
        if np.array_equal(order, np.arange(low, end)):
            yield part.read(low, len(order))
            continue
        low, end = int(order.min()), int(order.max()) + 1
        yield part.read(low, end - low)[order - low]
