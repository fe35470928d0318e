"""Proposals of text that a grammar forces, such as the property names of a JSON object."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..requests.request import Request
from .proposer import Tokens


class ForcedTokens:
    """Propose the text that a request's grammar forces, tokenized by the tokenizer.

    The model still samples every token, so results do not change, even if it tokenizes forced text in
    another way.

    Args:
        max_tokens: maximum tokens of one proposal.
    """

    def __init__(self, max_tokens: int = 32) -> None:
        self.max_tokens = max_tokens
        self._found: dict[str, list[int]] = {}

    def evidence(self, request: Request) -> int | None:
        """Return 0 if the grammar forces text, else None."""
        tokens = request.forced_tokens()
        if not tokens:
            return None
        self._found[request.request_id] = tokens
        return 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the tokens that ``evidence`` found."""
        return [np.array(self._found.pop(request.request_id)[:count], np.int64) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Drop the found tokens of the request."""
        self._found.pop(request.request_id, None)

    def close(self) -> None:
        """Drop all found tokens."""
        self._found.clear()
