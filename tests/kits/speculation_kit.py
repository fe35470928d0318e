"""Proposers with a chosen error rate, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from engine_kit import VOCAB, alone

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.proposer import Tokens


class Oracle:
    """Propose the known continuation of requests, with every ``lie_every``-th token wrong.

    Args:
        lie_every: distance of wrong tokens; 0 is none.
        max_tokens: maximum number of tokens of one proposal.
    """

    def __init__(self, lie_every: int = 0, max_tokens: int = 4) -> None:
        self.max_tokens = max_tokens
        self.proposals = 0
        self.closed = False
        self._lie_every = lie_every
        self._known: dict[str, list[int]] = {}

    def evidence(self, request: Request) -> int | None:
        """Return the same class for all requests with remaining tokens."""
        if request.request_id not in self._known:
            self._known[request.request_id] = alone(request)
        return 0 if len(self._known[request.request_id]) > len(request.output_token_ids) else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the next tokens of the known continuation, with the wrong ones."""
        self.proposals += len(wanted)
        return [self._told(request, count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Remove a request."""
        self._known.pop(request.request_id, None)

    def close(self) -> None:
        """Record the call."""
        self.closed = True

    @property
    def num_known(self) -> int:
        """Return the number of known requests."""
        return len(self._known)

    def _told(self, request: Request, count: int) -> Tokens:
        first = len(request.output_token_ids)
        tokens = np.array(self._known[request.request_id][first : first + count], np.int64)
        places = np.arange(first, first + len(tokens))
        lies = places % self._lie_every == 0 if self._lie_every else np.zeros(len(tokens), np.bool_)
        return np.where(lies, (tokens + 1) % VOCAB, tokens)
