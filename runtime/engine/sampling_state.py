"""What one request remembers between its draws."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from .logits_processors import AllowedTokens, BadWords, LogitBias, LogitsProcessor, MinTokens, NoRepeatNgram
from .penalties import Penalties

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """SplitMix64's output function (Steele et al.: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SamplingState:
    """One request's sampling options, random stream and logits processors.

    The draw for the n-th token is a pure function of seed and n, so it does not depend on the batch, on
    preemption or on how often a step was repeated.

    Args:
        params: the request's options.
        prompt_token_ids: [n], for the repetition penalty and repeated n-grams.
        end_token_ids: tokens masked until ``min_tokens`` are generated.
        bad_words: token sequences that must not be generated.
    """

    __slots__ = ("_key", "num_tokens", "params", "processors")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: npt.NDArray[np.int64],
        end_token_ids: Collection[int] = (),
        bad_words: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.params = params
        self.num_tokens = 0
        self._key = _mix(params.seed if params.seed is not None else secrets.randbits(63))
        self.processors: list[LogitsProcessor] = list(_penalties(params, prompt_token_ids))
        if bad_words:
            self.processors.append(BadWords(bad_words))
        if params.min_tokens:
            self.processors.append(MinTokens(end_token_ids))

    def observe(self, token: int) -> None:
        """Take note of a generated token."""
        self.num_tokens += 1
        for processor in self.processors:
            processor.observe(token)
        if self.num_tokens == self.params.min_tokens:
            self.processors = [p for p in self.processors if not isinstance(p, MinTokens)]

    def uniform(self) -> float:
        """The draw for the next token, in [0, 1)."""
        z = _mix((self._key + (self.num_tokens + 1) * _GOLDEN_GAMMA) & _MASK)
        return (z >> 11) * 2.0**-53

    def processed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """``logits`` [vocab_size] with penalties and masks: a changed copy, or itself if there are none."""
        if not self.processors:
            return logits
        logits = logits.copy()
        for processor in self.processors:
            processor.apply(logits)
        return logits


def _penalties(params: SamplingParams, prompt_token_ids: npt.NDArray[np.int64]) -> Iterator[LogitsProcessor]:
    if Penalties.wanted(params):
        yield Penalties(params, prompt_token_ids)
    if params.logit_bias:
        yield LogitBias(params.logit_bias)
    if params.no_repeat_ngram_size:
        yield NoRepeatNgram(params.no_repeat_ngram_size, prompt_token_ids)
    if params.allowed_token_ids:
        yield AllowedTokens(params.allowed_token_ids)
