"""Which of a sequence's old keys are worth keeping, as far as the cache alone tells.

Attention kernels give out no scores over the past, so importance must be read off the keys. Those that are
like most others can be spared (KeyDiff, Park et al., arXiv:2504.15364). Distances in place of angles favour
large keys too, which served better than small ones (Devoto et al., arXiv:2406.11430) when measured
(``docs/engine.md``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import KVEviction


def chosen_rows(keys: npt.NDArray[Any], eviction: KVEviction, *, windowed: bool) -> npt.NDArray[np.int64]:
    """Which of a layer's keys [heads, n, width] stay between the sinks and the recent ones.

    Args:
        keys: of all that the cache holds.
        eviction: how many stay.
        windowed: attention looks at none but recent ones, so the last of them will do.

    Returns:
        Rows [heads, count], ascending.
    """
    end = keys.shape[1] - eviction.recent
    count = eviction.kept - eviction.sinks - eviction.recent
    if windowed:
        return np.tile(np.arange(end - count, end), (len(keys), 1))
    return eviction.sinks + distinct_keys(keys[:, eviction.sinks : end], count)


def distinct_keys(keys: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Which of keys [heads, n, width] lie farthest from their head's mean.

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
