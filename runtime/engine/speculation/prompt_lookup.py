"""Prompt lookup decoding (Saxena, 2023): propose the tokens that followed an earlier match of the last ones.

It helps where the output repeats the prompt, as in summaries, quotes and edits. The longest match is found
with hash chains, as in LZ77: each position links to the previous one with the same last two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..requests.request import Request
from .proposer import Tokens

_MAX_CANDIDATES = 16
_MAX_MATCH = 32  # tokens; longer matches are not told apart


class History:
    """The tokens of a request, with a search for earlier matches of their end."""

    def __init__(self) -> None:
        self.match = (0, 0)  # length of the last match found, position after it
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []  # per position, the previous one with the same two tokens, or -1

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        known, latest, earlier = self._tokens, self._latest, self._earlier
        last = known[-1] if known else -1
        for token in tokens:
            key = last, token
            earlier.append(latest.get(key, -1))
            latest[key] = len(known)
            known.append(token)
            last = token

    def find(self) -> int:
        """Find the longest suffix that occurred before, the latest of equal ones; return its length or 0."""
        length, after = 0, 0
        candidate = self._earlier[-1] if self._earlier else -1
        for _ in range(_MAX_CANDIDATES):
            if candidate < 0 or length == _MAX_MATCH:
                break
            common = self._common(candidate)
            if common > length:
                length, after = common, candidate + 1
            candidate = self._earlier[candidate]
        self.match = length, after
        return length

    def following(self, count: int) -> Tokens:
        """Return ``count`` tokens that followed the match, repeated cyclically if there are fewer."""
        after = self.match[1]
        return np.resize(np.array(self._tokens[after : after + count], np.int64), count)

    def _common(self, candidate: int) -> int:
        """Return how many tokens before and at ``candidate`` equal the last tokens."""
        tokens, end = self._tokens, len(self._tokens) - 1
        most = min(candidate + 1, _MAX_MATCH)
        common = 2
        while common < most and tokens[candidate - common] == tokens[end - common]:
            common += 1
        return common


class PromptLookup:
    """Propose the tokens that followed an earlier occurrence of the last two or more tokens.

    Args:
        max_tokens: maximum tokens of one proposal.
    """

    def __init__(self, max_tokens: int = 16) -> None:
        self.max_tokens = max_tokens
        self._histories: dict[str, History] = {}

    def evidence(self, request: Request) -> int | None:
        """Return the bit length of the match's length, None if there is no match."""
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = History()
        history.extend(request.token_slice(len(history), request.num_tokens).tolist())
        return history.find().bit_length() or None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the tokens that followed the matches found by ``evidence``."""
        return [self._histories[request.request_id].following(count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Drop the request's history."""
        self._histories.pop(request.request_id, None)

    def close(self) -> None:
        """Drop all histories."""
        self._histories.clear()
