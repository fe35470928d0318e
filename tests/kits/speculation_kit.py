"""Proposers for tests, as good or as bad as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from engine_kit import VOCAB, alone

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.proposer import Tokens


class Oracle:
    """Knows how requests go on, and lies about every ``lie_every``-th token of an output.

    Args:
        lie_every: 0 never lies.
        max_tokens: most tokens of one proposal.
    """

    def __init__(self, lie_every: int = 0, max_tokens: int = 4) -> None:
        self.max_tokens = max_tokens
        self.proposals = 0
        self.closed = False
        self._lie_every = lie_every
        self._known: dict[str, list[int]] = {}

    def evidence(self, request: Request) -> int | None:
        """One class for all, as long as the request goes on."""
        if request.request_id not in self._known:
            self._known[request.request_id] = alone(request)
        return 0 if len(self._known[request.request_id]) > len(request.output_token_ids) else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """The truth, but for the lies."""
        self.proposals += len(wanted)
        return [self._told(request, count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Drop what is known of a request."""
        self._known.pop(request.request_id, None)

    def close(self) -> None:
        """Take note."""
        self.closed = True

    @property
    def num_known(self) -> int:
        """Requests not forgotten."""
        return len(self._known)

    def _told(self, request: Request, count: int) -> Tokens:
        first = len(request.output_token_ids)
        tokens = np.array(self._known[request.request_id][first : first + count], np.int64)
        places = np.arange(first, first + len(tokens))
        lies = places % self._lie_every == 0 if self._lie_every else np.zeros(len(tokens), np.bool_)
        return np.where(lies, (tokens + 1) % VOCAB, tokens)
