"""Proposals by heads that guess one token each from the model's last hidden state (Medusa)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError
from ..requests.request import Request
from .proposer import Tokens
from .runner_proposer import draw_guesses

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]


class MedusaHeads:
    """Propose the guesses of the heads behind the newest token.

    Args:
        run: returns logits [rows, heads, vocab_size] for hidden states [rows, hidden_size].
        max_tokens: maximum tokens of one proposal, at most the number of heads.
        hidden_size: columns of the model's hidden states that are read.
    """

    def __init__(self, run: Callable[[Floats], Floats], max_tokens: int, hidden_size: int) -> None:
        self.max_tokens = max_tokens
        self._run = run
        self._hidden_size = hidden_size
        self._last: dict[str, tuple[int, Floats]] = {}  # by request, the newest state and the place behind it
        self._failed = False

    def wants_states(self, request: Request, stop: int) -> bool:
        """Whether hidden states of a row that ends at ``stop`` are to be observed: the newest ones only."""
        return not self._failed and request.pooling is None and stop >= request.num_tokens

    def observe(self, request: Request, start: int, states: Floats) -> None:
        """Keep the last of the hidden states [n, hidden_size] of a request's tokens from ``start`` on."""
        self._last[request.request_id] = start + len(states), states[-1, : self._hidden_size].copy()

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the hidden state in front of the newest token is known, else None."""
        end, _ = self._last.get(request.request_id, (None, None))
        return 0 if not self._failed and end == request.num_tokens - 1 else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the guesses of the first heads; none if they fail."""
        try:
            logits = self._run(np.stack([self._last[request.request_id][1] for request, _ in wanted]))
        except ProviderRuntimeError as error:
            _log.warning("the Medusa heads failed and are disabled: %s", error)
            self._failed = True
            return [np.empty(0, np.int64)] * len(wanted)
        guesses: list[list[int]] = [[] for _ in wanted]
        for head in range(max(count for _, count in wanted)):
            rows = [i for i, (_, count) in enumerate(wanted) if head < count]
            draw_guesses(
                [wanted[i][0] for i in rows], [logits[i, head] for i in rows], [guesses[i] for i in rows]
            )
        return [np.array(guessed, np.int64) for guessed in guesses]

    def forget(self, request: Request) -> None:
        """Drop the request's hidden state."""
        self._last.pop(request.request_id, None)

    def close(self) -> None:
        """Drop all hidden states."""
        self._last.clear()
