"""Logits to tokens, for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .draw import draw
from .sampling_state import SamplingState
from .top_candidates import top_candidates

Row = npt.NDArray[np.float32]  # [vocab_size]

NO_TOKEN = -1

# Rows are stacked for random choice in groups of about this many logits, which fit into a core's own cache.
_GROUP_LOGITS = 2**18


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the model's own distribution; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token, NO_TOKEN if the row's logits are no numbers; log-probabilities start with its own."""

    token_id: int
    logprobs: tuple[TokenLogprob, ...] = ()


def sample(logits: Sequence[Row], states: Sequence[SamplingState]) -> list[Sample]:
    """Choose the next token of each row.

    Args:
        logits: per row [vocab_size]; not changed.
        states: per row; not changed, so that a step can be repeated.
    """
    processed = [state.processed(row) for row, state in zip(logits, states, strict=True)]
    tokens = [_most_likely(row) for row in processed]
    random = [i for i, state in enumerate(states) if not state.params.greedy and tokens[i] != NO_TOKEN]
    group = max(1, _GROUP_LOGITS // len(processed[0])) if processed else 1
    for start in range(0, len(random), group):
        chosen = random[start : start + group]
        drawn = draw(
            np.stack([processed[i] for i in chosen]),
            [states[i].params for i in chosen],
            np.array([states[i].uniform() for i in chosen]),
        )
        for i, token in zip(chosen, drawn.tolist(), strict=True):
            tokens[i] = token
    return [
        Sample(token, _logprobs(row, token, state.params.logprobs))
        for row, token, state in zip(logits, tokens, states, strict=True)
    ]


def _most_likely(logits: Row) -> int:
    """The lowest of the most likely tokens. argmax stops at a NaN, so one look tells if the row is sound."""
    token = int(logits.argmax())
    return token if np.isfinite(logits[token]) else NO_TOKEN


def _logprobs(logits: Row, token: int, alternatives: int | None) -> tuple[TokenLogprob, ...]:
    if alternatives is None or token == NO_TOKEN:
        return ()
    largest = logits.max()
    normalizer = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    own = logits[token]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    result = [TokenLogprob(token, float(own) - normalizer, rank)]
    if alternatives:
        count = min(alternatives, len(logits))
        top = top_candidates(logits[None], np.array([count])).token_ids[0, :count].tolist()
        result += [
            TokenLogprob(other, float(logits[other]) - normalizer, place)
            for place, other in enumerate(top, start=1)
            if other != token
        ]
    return tuple(result)
