"""What one request remembers between its draws."""

from __future__ import annotations

import secrets
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from .penalties import Penalties

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """SplitMix64's output function (Steele et al.: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SamplingState:
    """One request's sampling options, random stream and penalties.

    The draw for the n-th token is a pure function of seed and n, so it does not depend on the batch, on
    preemption or on how often a step was repeated.

    Args:
        params: the request's options.
        prompt_token_ids: [n], for the repetition penalty.
        end_token_ids: tokens masked until ``min_tokens`` are generated.
    """

    __slots__ = ("_end_token_ids", "_key", "_penalties", "num_tokens", "params")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: npt.NDArray[np.int64],
        end_token_ids: Collection[int] = (),
    ) -> None:
        self.params = params
        self.num_tokens = 0
        self._key = _mix(params.seed if params.seed is not None else secrets.randbits(63))
        self._penalties = Penalties(params, prompt_token_ids) if Penalties.wanted(params) else None
        self._end_token_ids = np.array(sorted(end_token_ids), np.int64) if params.min_tokens else None

    def observe(self, token: int) -> None:
        """Take note of a generated token."""
        self.num_tokens += 1
        if self._penalties is not None:
            self._penalties.observe(token)

    def uniform(self) -> float:
        """The draw for the next token, in [0, 1)."""
        z = _mix((self._key + (self.num_tokens + 1) * _GOLDEN_GAMMA) & _MASK)
        return (z >> 11) * 2.0**-53

    def processed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """``logits`` [vocab_size] with penalties and masks: a changed copy, or itself if there are none."""
        masked = self._end_token_ids is not None and self.num_tokens < self.params.min_tokens
        if self._penalties is None and not masked:
            return logits
        logits = logits.copy()
        if self._penalties is not None:
            self._penalties.apply(logits)
        if masked:
            logits[self._end_token_ids] = -np.inf
        return logits
