"""DRY: a penalty on tokens that continue a repetition.

By its author's definition (https://github.com/oobabooga/text-generation-webui/pull/5677): if the last n >=
``allowed`` tokens occurred before, the logit of the token that followed them is lowered by
``multiplier * base ** (n - allowed)``. A repetition does not extend over a sequence breaker.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from ...types.sampling_params import SamplingParams

_FIRST_CAPACITY = 256
_MAX_PENALTY = 1e30  # finite in float32

Integers = npt.NDArray[np.int64]


class Dry:
    """The DRY state of one request.

    Args:
        params: the ``dry_`` options.
        breakers: token ids that end a repetition.
        prompt_token_ids: [n].
    """

    lowers = True

    def __init__(self, params: SamplingParams, breakers: Collection[int], prompt_token_ids: Integers) -> None:
        self._params = params
        self._breakers = np.array(sorted(breakers), np.int64)
        self._size = len(prompt_token_ids)
        self._tokens = np.concatenate([prompt_token_ids, np.zeros(_FIRST_CAPACITY, np.int64)])
        self._most = params.dry_allowed_length
        if params.dry_base > 1.0:  # longer repetitions would exceed _MAX_PENALTY
            self._most += math.ceil(
                max(math.log(_MAX_PENALTY) - math.log(params.dry_multiplier), 0.0) / math.log(params.dry_base)
            )

    def observe(self, token: int) -> None:
        """Append a generated token."""
        if self._size == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._size] = token
        self._size += 1

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Lower the logits [vocab_size] of tokens that continue a repetition, in place."""
        last_n = self._params.dry_penalty_last_n
        tokens = self._tokens[max(0, self._size - last_n) if last_n else 0 : self._size]
        ends, lengths = self._runs(tokens)
        followers = tokens[ends + 1]
        wanted = (lengths >= self._params.dry_allowed_length) & ~np.isin(followers, self._breakers)
        followers, places = np.unique(followers[wanted], return_inverse=True)
        longest = np.zeros(len(followers), np.int64)
        np.maximum.at(longest, places, lengths[wanted])
        with np.errstate(over="ignore"):
            penalty = self._params.dry_multiplier * self._params.dry_base ** (
                longest - self._params.dry_allowed_length
            ).astype(np.float64)
        logits[followers] -= np.minimum(penalty, _MAX_PENALTY).astype(np.float32)

    def _runs(self, tokens: Integers) -> tuple[Integers, Integers]:
        """Return positions before the end whose preceding tokens equal the last ones, and how many do."""
        lengths = np.zeros(max(len(tokens) - 1, 0), np.int64)
        alive = np.arange(len(lengths))
        for length in range(1, min(len(tokens) - 1, self._most) + 1):
            token = tokens[-length]
            alive = alive[alive >= length - 1]
            alive = alive[tokens[alive - length + 1] == token]
            if not len(alive) or token in self._breakers:
                break
            lengths[alive] = length
        ends = np.flatnonzero(lengths)
        return ends, lengths[ends]
