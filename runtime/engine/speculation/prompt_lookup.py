"""Prompt lookup decoding (Saxena, 2023): propose the tokens that followed an earlier match of the last ones.

It helps where the output repeats the prompt, as in summaries, quotes and edits, or the answer to another
request of the same tenant. The longest match is found with hash chains, as in LZ77: each position links to
the previous one with the same last two tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..requests.request import Request
from .proposer import Tokens

_MAX_CANDIDATES = 16
_MAX_MATCH = 32  # tokens; longer matches are not told apart
_POOLED = 3  # tokens of the shortest match in answers to other requests
_BETWEEN = -1  # between two answers in the pool
_IN_POOL = 8  # added to the evidence of matches in the pool, which are accepted at another rate
_MOST_TENANTS = 64


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


class Pool:
    """The newest answers of a tenant, with a search for where the last tokens of a text occur in them.

    Args:
        most_tokens: tokens that are kept, at most.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # where three tokens end that occur last

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer; if the pool is full, the older half of it goes."""
        if len(self._tokens) + len(tokens) >= self._most:
            kept = self._tokens[-(self._most // 2) :]
            self._tokens, self._latest = [], {}
            self._append(kept)
        self._append([*tokens[-(self._most // 2) :], _BETWEEN])

    def find(self, end: Sequence[int]) -> tuple[int, int]:
        """Return the length of the latest match of the end of a text, 0 for none, and where it ends."""
        after = self._latest.get(tuple(end[-_POOLED:]), 0)
        length = 0
        while length < min(after, len(end)) and self._tokens[after - 1 - length] == end[-1 - length]:
            length += 1
        return length, after

    def following(self, after: int, count: int) -> Tokens:
        """Return up to ``count`` tokens of the same answer that follow a match."""
        found = self._tokens[after : after + count]
        end = found.index(_BETWEEN) if _BETWEEN in found else len(found)
        return np.array(found[:end], np.int64)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            if token != _BETWEEN:
                self._latest[tuple(self._tokens[-_POOLED:])] = len(self._tokens)


class PromptLookup:
    """Propose the tokens that followed an earlier occurrence of the last two or more tokens.

    That is in the request itself, or in a recent answer to another request of its tenant if the match there
    is longer.

    Args:
        max_tokens: maximum tokens of one proposal.
        pool_tokens: tokens of answers that are kept for each tenant; 0 keeps none.
    """

    def __init__(self, max_tokens: int = 16, pool_tokens: int = 1 << 16) -> None:
        self.max_tokens = max_tokens
        self._pool_tokens = pool_tokens
        self._histories: dict[str, History] = {}
        self._pools: OrderedDict[object, Pool] = OrderedDict()  # by tenant, least recently used first
        self._pooled: dict[str, tuple[Pool, int]] = {}  # by request, a better match in the pool

    def evidence(self, request: Request) -> int | None:
        """Return the bit length of the match's length, 8 more if it is in the pool, None for no match."""
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = History()
        history.extend(request.token_slice(len(history), request.num_tokens).tolist())
        own = history.find()
        self._pooled.pop(request.request_id, None)
        pool = self._pools.get(_tenant(request))
        if pool is not None and own < _MAX_MATCH:
            first = max(0, request.num_tokens - _MAX_MATCH)
            length, after = pool.find(request.token_slice(first, request.num_tokens).tolist())
            if length > max(own, _POOLED - 1) and len(pool.following(after, 1)):
                self._pooled[request.request_id] = pool, after
                return _IN_POOL + length.bit_length()
        return own.bit_length() or None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return the tokens that followed the matches found by ``evidence``."""
        return [self._following(request.request_id, count) for request, count in wanted]

    def _following(self, request_id: str, count: int) -> Tokens:
        if request_id in self._pooled:
            pool, after = self._pooled[request_id]
            return pool.following(after, count)
        return self._histories[request_id].following(count)

    def forget(self, request: Request) -> None:
        """Drop the request's history, and keep its answer for its tenant."""
        self._pooled.pop(request.request_id, None)
        if self._histories.pop(request.request_id, None) is None or not self._pool_tokens:
            return
        pool = self._pools.pop(_tenant(request), None) or Pool(self._pool_tokens)
        pool.add(request.output_token_ids)
        self._pools[_tenant(request)] = pool
        if len(self._pools) > _MOST_TENANTS:
            self._pools.popitem(last=False)

    def close(self) -> None:
        """Drop all histories."""
        self._histories.clear()
        self._pools.clear()


def _tenant(request: Request) -> object:
    """Return whose answers a request may repeat: those that could share its KV, of the same tenant."""
    return request.tenant, request.kv_salt
