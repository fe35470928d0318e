"""The log-probabilities of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...types.sampling_params import SamplingParams
from ..sampling.sampler import TokenLogprob, token_logprobs


class PromptLogprobs:
    """Log-probabilities of the tokens of one prompt, computed from its logits, which come in pieces.

    Args:
        token_ids: the prompt.
        params: whether they are wanted, from which token on, and how many.
    """

    def __init__(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._token_ids = token_ids
        self._count = params.prompt_logprobs  # likely tokens at each place; None wants nothing
        unwanted = min(max(1, params.prompt_logprobs_start), len(token_ids))  # the first token has none
        self._known: list[Sequence[TokenLogprob]] = [()] * unwanted

    @property
    def awaited(self) -> bool:
        """Whether some are wanted and missing."""
        return self._count is not None and len(self._known) < len(self._token_ids)

    @property
    def first_logits(self) -> int:
        """The position of the first logits that are missing."""
        return len(self._known) - 1

    def observe(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Take log-probabilities of the tokens after ``start`` from logits [n, vocab_size].

        Known ones are skipped, since a preempted request is recomputed.
        """
        logits = logits[self.first_logits - start :]
        start = self.first_logits
        tokens = self._token_ids[start + 1 : start + 1 + len(logits)]
        counts = [self._count or 0] * len(tokens)
        self._known += token_logprobs(list(logits[: len(tokens)]), tokens, counts)

    def known(self) -> list[Sequence[TokenLogprob]] | None:
        """Return the known ones by token, empty before the first wanted one; None if none are wanted."""
        return None if self._count is None else self._known.copy()  # a reader's thread may ask
