"""The embedding of a text, pooled from the hidden states of its tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

# How an embedding is pooled: the hidden state of the last token, or the mean over all tokens.
Pooling = Literal["last", "mean"]


class PooledStates:
    """Hidden states of one text, which come in pieces, pooled to an embedding; None pools nothing."""

    def __init__(self, pooling: Pooling | None) -> None:
        self.pooling = pooling
        self.num_tokens = 0  # how many were pooled
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, start: int, states: npt.NDArray[np.float32]) -> None:
        """Pool hidden states [n, hidden_size] of the tokens from ``start`` on.

        Tokens that were pooled before are skipped, since a preempted request is recomputed.
        """
        fresh = states[-1:] if self.pooling == "last" else states[max(0, self.num_tokens - start) :]
        found = fresh.sum(axis=0, dtype=np.float64)
        self._sum = found if self._sum is None else self._sum + found
        self.num_tokens = max(self.num_tokens, start + len(states))

    def embedding(self) -> npt.NDArray[np.float32] | None:
        """Return the embedding of the tokens until now; None if there are none."""
        if self._sum is None:
            return None
        return (self._sum / (self.num_tokens if self.pooling == "mean" else 1)).astype(np.float32)
