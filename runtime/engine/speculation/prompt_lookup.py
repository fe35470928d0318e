"""Proposals from the text so far: what followed the last time that the same tokens came.

Prompt lookup decoding (Saxena, 2023): texts that are summarised, quoted or edited contain much of the answer.
The longest match is found as in LZ77 compressors, by hash chains: each position knows the previous one that
ends in the same few tokens, so a new token costs one look-up and a search looks at few positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..requests.request import Request
from .proposer import Tokens

_MOST_CANDIDATES = 16
_LONGEST = 32  # a match of so many tokens is as good as a longer one


class History:
    """A request's tokens, searchable by their end."""

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
        """Look for the longest end that occurred before, the latest of several; return its length or 0."""
        length, after = 0, 0
        candidate = self._earlier[-1] if self._earlier else -1
        for _ in range(_MOST_CANDIDATES):
            if candidate < 0 or length == _LONGEST:
                break
            common = self._common(candidate)
            if common > length:
                length, after = common, candidate + 1
            candidate = self._earlier[candidate]
        self.match = length, after
        return length

    def following(self, count: int) -> Tokens:
        """``count`` tokens from behind the match; where that reaches the end, it begins anew."""
        after = self.match[1]
        return np.resize(np.array(self._tokens[after : after + count], np.int64), count)

    def _common(self, candidate: int) -> int:
        """How many tokens up to ``candidate`` equal those up to the end."""
        tokens, end = self._tokens, len(self._tokens) - 1
        most = min(candidate + 1, _LONGEST)
        common = 2
        while common < most and tokens[candidate - common] == tokens[end - common]:
            common += 1
        return common


class PromptLookup:
    """Proposes what followed an earlier occurrence of the last two or more tokens.

    Args:
        max_tokens: most tokens of one proposal.
    """

    def __init__(self, max_tokens: int = 16) -> None:
        self.max_tokens = max_tokens
        self._histories: dict[str, History] = {}

    def evidence(self, request: Request) -> int | None:
        """The match's length, in powers of two."""
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = History()
        history.extend(request.token_slice(len(history), request.num_tokens).tolist())
        return history.find().bit_length() or None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """What followed the matches that ``evidence`` has just found."""
        return [self._histories[request.request_id].following(count) for request, count in wanted]

    def forget(self, request: Request) -> None:
        """Drop the request's history."""
        self._histories.pop(request.request_id, None)

    def close(self) -> None:
        """Drop everything."""
        self._histories.clear()
