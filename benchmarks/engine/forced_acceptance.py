"""Proposals that are right at a rate of choice: what a trained head gains, on a model with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.proposer import Proposer, StateReader, Tokens


class ForcedAcceptance:
    """Run a head for each proposal, and replace its tokens by the request's own next ones or by wrong ones.

    Times are those of the head and of real steps; only the acceptance is not measured. llama.cpp has the
    same for its benchmarks (``--spec-synth-rates``).

    Args:
        head: a draft head.
        rate: how often a token is right.

    Attributes:
        texts: the prompt and the whole answer of each request by its id.
    """

    def __init__(self, head: Proposer, rate: float) -> None:
        if not isinstance(head, StateReader):
            raise TypeError("a forced acceptance needs a head that reads hidden states, such as mtp")
        self._head, self._reader, self._rate = head, head, rate
        self._random = np.random.default_rng(0)
        self.max_tokens = head.max_tokens
        self.texts: Mapping[str, Sequence[int]] = {}

    def evidence(self, request: Request) -> int | None:
        """See ``Proposer``."""
        return self._head.evidence(request) if request.request_id in self.texts else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """See ``Proposer``."""
        return [
            self._replaced(guesses, self.texts[request.request_id][request.num_tokens :])
            for guesses, (request, _) in zip(self._head.propose(wanted), wanted, strict=True)
        ]

    def _replaced(self, guesses: Tokens, text: Sequence[int]) -> Tokens:
        right = np.array(text[: len(guesses)], np.int64)
        wrong = self._random.random(len(right)) >= self._rate
        return np.where(wrong, right ^ 1, right)

    def wants_states(self, request: Request, stop: int) -> bool:
        """See ``StateReader``."""
        return self._reader.wants_states(request, stop)

    def observe(self, request: Request, start: int, states: npt.NDArray[np.float32]) -> None:
        """See ``StateReader``."""
        self._reader.observe(request, start, states)

    def forget(self, request: Request) -> None:
        """See ``Proposer``."""
        self._head.forget(request)

    def close(self) -> None:
        """See ``Proposer``."""
        self._head.close()
