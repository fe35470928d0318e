"""Pack rows of GGUF files into tiles by the library of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...graph_opt.lower.kernels import StoredMatrix, TilePacker
from ...graph_opt.lower.products.stored_tiles import Bytes, stored_tile_bytes
from ...graph_opt.lower.products.tiles import COLUMNS
from .library import load


def tile_packer(library: Path) -> TilePacker:
    """Return the routine that packs tiles; threads may call it at the same time, outside of Python's lock.

    Args:
        library: the file of the kernels.
    """

    def pack(matrices: Sequence[StoredMatrix]) -> list[Bytes]:
        kept = [[np.ascontiguousarray(part) for part in matrix.parts] for matrix in matrices]
        rows = [_addresses(parts) for parts in kept]
        tiles = [
            np.empty((-(-len(each) // COLUMNS), stored_tile_bytes(matrix.form, matrix.inputs)), np.uint8)
            for matrix, each in zip(matrices, rows, strict=True)
        ]
        calls = [_call(*each) for each in zip(matrices, rows, tiles, strict=True)]
        numbers = np.array(calls, np.int64)
        if load(library).carryall_pack_stored(numbers.ctypes.data, len(calls)) >= 0:
            raise CheckpointError(
                "the GGUF file holds a weight whose scale is infinite or no number; download it again"
            )
        return tiles

    return pack


def _addresses(parts: Sequence[Bytes]) -> npt.NDArray[np.int64]:
    return np.concatenate(
        [part.ctypes.data + np.arange(len(part), dtype=np.int64) * part.shape[1] for part in parts]
    )


def _call(matrix: StoredMatrix, rows: npt.NDArray[np.int64], tiles: Bytes) -> tuple[int, ...]:
    """Return the fields of ``PackCall`` of ``sources/entry.cpp``."""
    form = matrix.form
    sizes = (matrix.inputs, len(rows), form.bits, form.block, form.offsets, form.group)
    return rows.ctypes.data, *sizes, tiles.ctypes.data
