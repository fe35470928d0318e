"""Pack rows of GGUF files into tiles by the library of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import CheckpointError
from ...graph_opt.lower.kernels import StoredForm, TilePacker
from ...graph_opt.lower.products.stored_tiles import Bytes, stored_tile_bytes
from ...graph_opt.lower.products.tiles import COLUMNS
from .library import load


def tile_packer(library: Path) -> TilePacker:
    """Return the routine that packs tiles; threads may call it at the same time, outside of Python's lock.

    Args:
        library: the file of the kernels.
    """

    def pack(form: StoredForm, parts: Sequence[Bytes], inputs: int) -> Bytes:
        arrays = [np.ascontiguousarray(part) for part in parts]
        addresses = np.concatenate(
            [part.ctypes.data + np.arange(len(part), dtype=np.int64) * part.shape[1] for part in arrays]
        )
        outputs = len(addresses)
        tiles = np.empty((-(-outputs // COLUMNS), stored_tile_bytes(form, inputs)), np.uint8)
        sizes = (inputs, outputs, form.bits, form.block, form.offsets, form.group, 0, len(tiles))
        wrong = load(library).carryall_pack_stored(addresses.ctypes.data, *sizes, tiles.ctypes.data)
        if wrong >= 0:
            raise CheckpointError(
                "the GGUF file holds a weight whose scale is infinite or no number; download it again"
            )
        return tiles

    return pack
