"""KV of one layer in blocks on the host, and how the rows that stay move together.

A row is what the cache holds of a token in one KV head; rows of 8 bits carry their own scale and zero point,
so they move as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..base import KVEviction
from .kv_selection import chosen_rows

Array = npt.NDArray[Any]
AFFINE_BYTES = 8  # in front of a row of 8 bits: scale and zero point, a float each


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Keys and values of a layer, [blocks, heads, block_size, width] each.

    Args:
        keys: float16 if they are bfloat16, as OpenVINO shows them.
        values: likewise.
        bfloat: whether they are.
        windowed: whether attention looks at recent rows only.
    """

    keys: Array
    values: Array
    bfloat: bool
    windowed: bool

    def evict_kv(
        self, blocks: Sequence[int], targets: Sequence[int], held: int, eviction: KVEviction
    ) -> None:
        """Move the rows that stay, of the ``held`` ones in ``blocks``, to the first rows of ``targets``.

        Args:
            blocks: of the sequence, in order.
            targets: where to; they may be some of ``blocks``.
            held: rows of the sequence.
            eviction: how many stay.
        """
        count, size = self.keys.shape[1:3]
        heads, first, last = np.arange(count)[:, None], eviction.sinks, held - eviction.recent
        chosen = chosen_rows(self._rows(blocks, held), eviction, windowed=self.windowed)
        ends = [np.tile(np.arange(*end), (count, 1)) for end in ((0, first), (last, held))]
        kept = np.concatenate([ends[0], chosen, ends[1]], axis=1)
        source, place = np.array(blocks), np.arange(eviction.kept)
        for cache in (self.keys, self.values):
            moved = cache[source[kept // size], heads, kept % size]
            cache[np.array(targets)[place // size], heads, place % size] = moved

    def _rows(self, blocks: Sequence[int], held: int) -> Array:
        """Keys [heads, held, head_size] as numbers; of a windowed layer any, since nobody looks at them."""
        if self.windowed:
            return np.empty((self.keys.shape[1], held, 0), np.float32)
        rows = self.keys[list(blocks)].swapaxes(0, 1)
        rows = rows.reshape(len(rows), -1, rows.shape[-1])[:, :held]
        if rows.dtype == np.uint8:
            affine = np.ascontiguousarray(rows[..., :AFFINE_BYTES]).view(np.float32)
            return (rows[..., AFFINE_BYTES:] - affine[..., 1:]) * affine[..., :1]
        return rows.view(ml_dtypes.bfloat16) if self.bfloat else rows
