"""Which of a sequence's old keys are worth keeping, as far as the cache alone tells.

Attention kernels give out no scores over the past, so importance must be read off the keys. Devoto et al.
(arXiv:2406.11430) keep those of small norm. Measured here, large ones served better (``docs/engine.md``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def largest_keys(keys: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Which of keys [heads, n, width] have each head's largest norms: indices [heads, count], ascending."""
    if not count:
        return np.zeros((len(keys), 0), np.int64)
    wide = keys.astype(np.float32, copy=False)
    norms = np.einsum("hnw,hnw->hn", wide, wide)
    best = np.argpartition(norms, -count, axis=1)[:, -count:]
    best.sort(axis=1)
    return best
