"""Proposals from a demanded form: what a grammar leaves no choice about, such as names in a JSON object."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..requests.request import Request
from .proposer import Tokens


class ForcedTokens:
    """Proposes the text that a request's grammar forces, in the tokenizer's own spelling.

    The model still draws every token, so the result is what it would have been one token at a time, even
    where it spells forced text otherwise.

    Args:
        max_tokens: most tokens of one proposal.
    """

    def __init__(self, max_tokens: int = 32) -> None:
        self.max_tokens = max_tokens
        self._found: dict[str, list[int]] = {}

    def evidence(self, request: Request) -> int | None:
        """Whether any text is forced."""
        tokens = request.forced_tokens()
        if not tokens:
            return None
        self._found[request.request_id] = tokens
        return 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """The tokens that ``evidence`` has just found."""
        return [np.array(self._found.pop(request.request_id)[:count], np.int64) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Drop what was found for the request."""
        self._found.pop(request.request_id, None)

    def close(self) -> None:
        """Drop everything."""
        self._found.clear()
