"""Logits to tokens, for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .draw import draw
from .sampling_state import SamplingState
from .top_candidates import Row, top_candidates

NO_TOKEN = -1


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
    if random:
        uniforms = np.array([states[i].uniform() for i in random])
        drawn = draw([processed[i] for i in random], [states[i].params for i in random], uniforms)
        for i, token in zip(random, drawn.tolist(), strict=True):
            tokens[i] = token
    samples = [Sample(token) for token in tokens]
    wanted = [
        i for i, state in enumerate(states) if state.params.logprobs is not None and tokens[i] != NO_TOKEN
    ]
    for i, logprobs in zip(wanted, _logprobs(logits, tokens, states, wanted), strict=True):
        samples[i] = Sample(tokens[i], logprobs)
    return samples


def _most_likely(logits: Row) -> int:
    """The lowest of the most likely tokens. argmax stops at a NaN, so one look tells if the row is sound."""
    token = int(logits.argmax())
    return token if np.isfinite(logits[token]) else NO_TOKEN


def _logprobs(
    logits: Sequence[Row], tokens: Sequence[int], states: Sequence[SamplingState], wanted: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """For each of the ``wanted`` rows, its token's log-probability and those of the most likely others."""
    if not wanted:
        return []
    counts = [min(states[i].params.logprobs or 0, len(logits[i])) for i in wanted]
    top = top_candidates([logits[i] for i in wanted], np.maximum(counts, 1)).token_ids.tolist()
    return [
        _row_logprobs(logits[i], tokens[i], others[:count])
        for i, others, count in zip(wanted, top, counts, strict=True)
    ]


def _row_logprobs(logits: Row, token: int, others: Sequence[int]) -> tuple[TokenLogprob, ...]:
    largest, own = logits.max(), logits[token]
    normalizer = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))
    result = [TokenLogprob(token, float(own) - normalizer, rank)]
    result += [
        TokenLogprob(other, float(logits[other]) - normalizer, place)
        for place, other in enumerate(others, start=1)
        if other != token
    ]
    return tuple(result)
