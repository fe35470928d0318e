"""The inputs of one run of a slot graph for several rows of several tokens, padded on the right.

KV of padding is written after a row's tokens, where the row's next tokens overwrite it. Padding changes no
result: attention is causal, and matrix products and norms treat each token separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    INPUT_IDS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
)
from ..base import Row


def can_join(row: Row) -> bool:
    """Whether a row has neither input nor output hidden states, so that it may share a run."""
    return row.hidden_states is None and row.last_hidden_states is None


def joint_feeds(rows: Sequence[Row], *, positions: bool) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a run of these rows, by name.

    Args:
        rows: rows of several tokens; all return as many logits as the row that wants most.
        positions: whether the graph takes positions.
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
    }
    if positions:
        feeds[POSITION_IDS] = starts[:, None] + np.arange(size)
    return feeds
