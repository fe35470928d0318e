"""The largest logits of a row that are left when processors have lowered some."""

from __future__ import annotations

import math

import numpy as np

from ....providers.base import BestLogits
from .candidates import Row
from .filters import ROUNDING, Floats
from .sampling_state import SamplingState

_TINY = 1e-290  # shares of the sum before below this are not precise


def lowered_logits(row: BestLogits, state: SamplingState, scratch: Row) -> BestLogits | None:
    """Return the largest logits of a row after the processors of ``state``; None if none of them is known.

    A logit that is not known is at most the smallest known one, and no processor raises it. So known logits
    that stay above that one are the largest of all, and in their order.

    Args:
        row: the largest logits as the model gave them.
        state: its processors only lower logits (``SamplingState.lowers``).
        scratch: [vocab_size] of -inf, which it is again afterwards.
    """
    scratch[row.token_ids] = row.logits
    state.process(scratch)
    if state.error:
        scratch.fill(-np.inf)
        return None
    logits = scratch[row.token_ids]
    scratch[row.token_ids] = -np.inf
    left = np.flatnonzero(logits > row.logits[-1])
    if not len(left):
        return None
    left = left[np.lexsort((row.token_ids[left], -logits[left]))]
    decides = state.greedy or 0 < state.params.top_k <= len(left)
    logsumexp = row.logsumexp if decides else _most(row, logits)
    return BestLogits(row.token_ids[left], logits[left], logsumexp, row.vocab_size, row.whole, exact=False)


def _most(row: BestLogits, lowered: Row) -> float:
    """Return an upper bound of the log-sum-exp when known logits were lowered, and others maybe, too."""
    largest = float(row.logits[0])
    # The others cannot sum to more than before, which is known up to the rounding of the sum of all.
    rest = math.exp(row.logsumexp - largest) * (1.0 + ROUNDING) - _sum(row.logits, largest)
    share = _sum(lowered, largest) + max(0.0, rest)
    return largest + math.log(share) if share > _TINY else row.logsumexp


def _sum(logits: Row, largest: float) -> float:
    shares: Floats = logits.astype(np.float64)
    shares -= largest
    return float(np.exp(shares, out=shares).sum())
