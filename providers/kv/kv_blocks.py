"""KV eviction in blocks on the host: move the kept rows of a layer together.

A row is the KV of one token in one KV head. 8-bit rows contain their own scale and zero point, so they move
without change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...records import dataclass
from ..base import KVEviction


def chosen_rows(keys: npt.NDArray[Any], eviction: KVEviction, *, windowed: bool) -> npt.NDArray[np.int64]:
    """Return the kept rows of a layer between the attention sinks and the recent rows.

    Args:
        keys: [heads, n, width], all keys of the sequence.
        eviction: how many rows are kept.
        windowed: whether the layer has a sliding window; then the last of these rows are kept.

    Returns:
        Row indices [heads, count], ascending.
    """
    end = keys.shape[1] - eviction.recent
    count = eviction.kept - eviction.sinks - eviction.recent
    if windowed:
        return np.tile(np.arange(end - count, end), (len(keys), 1))
    return eviction.sinks + distinct_keys(keys[:, eviction.sinks : end], count)


def distinct_keys(keys: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return the ``count`` keys of [heads, n, width] farthest from the mean key of their head.

    Returns:
        Indices [heads, count], ascending.
    """
    if not count:
        return np.zeros((len(keys), 0), np.int64)
    wide = keys.astype(np.float32, copy=False)
    mean = wide.mean(axis=1)
    distances = np.einsum("hnw,hnw->hn", wide, wide) - 2 * np.einsum("hnw,hw->hn", wide, mean)
    best = np.argpartition(distances, -count, axis=1)[:, -count:]
    best.sort(axis=1)
    return best


Array = npt.NDArray[Any]
AFFINE_BYTES = 8  # at the start of an 8-bit row: scale and zero point, float32 each


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Keys and values of a layer, [blocks, heads, block_size, width] each.

    Args:
        keys: bfloat16 keys have dtype float16, as OpenVINO returns them.
        values: the same.
        bfloat: whether keys and values are bfloat16.
        windowed: whether the layer has a sliding window.
    """

    keys: Array
    values: Array
    bfloat: bool
    windowed: bool

    def evict_kv(
        self, blocks: Sequence[int], targets: Sequence[int], held: int, eviction: KVEviction
    ) -> None:
        """Move the kept rows of ``blocks`` to the first rows of ``targets``.

        Args:
            blocks: the blocks of the sequence, in order.
            targets: blocks to write; they may be some of ``blocks``.
            held: number of rows of the sequence.
            eviction: how many rows are kept.
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
        """Return keys [heads, held, head_size] as floats; for a windowed layer [heads, held, 0]."""
        if self.windowed:
            return np.empty((self.keys.shape[1], held, 0), np.float32)
        rows = self.keys[list(blocks)].swapaxes(0, 1)
        rows = rows.reshape(len(rows), -1, rows.shape[-1])[:, :held]
        if rows.dtype == np.uint8:
            affine = np.ascontiguousarray(rows[..., :AFFINE_BYTES]).view(np.float32)
            return (rows[..., AFFINE_BYTES:] - affine[..., 1:]) * affine[..., :1]
        return rows.view(ml_dtypes.bfloat16) if self.bfloat else rows
