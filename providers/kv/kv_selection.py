"""Select the KV rows to keep at an eviction, by their keys alone.

The attention kernels do not return scores, so importance is estimated from the keys: keys far from the mean
key are kept (KeyDiff, Park et al., arXiv:2504.15364). KeyDiff uses angles; Euclidean distances also favour
large keys, which measured better than small keys (Devoto et al., arXiv:2406.11430). Figures:
``docs/engine.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
