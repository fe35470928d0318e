"""Several rows of several tokens as the inputs of one run of a slot graph, padded on the right.

Padding is computed and written behind a row's tokens, where the row's next ones overwrite it. No token sees
it: attention is causal, and products and norms know a token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    CACHE_ROWS,
    INPUT_IDS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
)
from ..base import Row


def can_join(row: Row) -> bool:
    """Whether the row takes tokens and gives logits, and nothing else."""
    return row.hidden_states is None and row.last_hidden_states is None


def joint_feeds(rows: Sequence[Row], positions: Sequence[int] | None) -> dict[str, npt.NDArray[Any]]:
    """Inputs of a run of these rows, whose ``start`` is where their tokens go in the cache.

    Args:
        rows: with several tokens each; as many logits are wanted of all as of the one that wants most.
        positions: of their first tokens, where the graph takes positions.
    """
    counts = np.array([len(row.tokens) for row in rows])
    starts = np.array([row.start for row in rows])
    size = int(counts.max())
    wanted = max(1, *(row.num_logits for row in rows))
    feeds: dict[str, npt.NDArray[Any]] = {
        INPUT_IDS: np.stack([np.pad(row.tokens, (0, size - len(row.tokens))) for row in rows]),
        SEQLENS_K: (starts + size - 1).astype(np.int32),
        TOTAL_SEQUENCE_LENGTH: np.array(starts.max() + size, np.int32),
        LOGITS_POSITIONS: np.maximum(counts[:, None] + np.arange(-wanted, 0), 0),
        CACHE_ROWS: np.array([row.slot for row in rows]),
    }
    if positions is not None:
        feeds[POSITION_IDS] = np.array(positions)[:, None] + np.arange(size)
    return feeds
