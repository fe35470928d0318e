"""Ends outputs that run in a circle."""

from __future__ import annotations

import numpy as np

LONGEST = 64  # tokens of a repeated sequence
SHORTEST = 32  # tokens that repeat in all: a line of dashes is no loop yet


class RepetitionGuard:
    """Notices that the end of an output is one sequence of up to 64 tokens, again and again.

    Args:
        times: how often the sequence must stand there; at least 2.
    """

    def __init__(self, times: int) -> None:
        self._recent = np.full(LONGEST, -1, np.int64)  # the newest token first
        # By period: how many tokens up to the newest equal the token one period before.
        self._matched = np.zeros(LONGEST, np.int64)
        self._needed = np.maximum(np.arange(1, LONGEST + 1) * (times - 1), SHORTEST)

    def observe(self, token: int) -> bool:
        """Take a generated token; return whether the output runs in a circle."""
        same = self._recent == token
        self._matched = (self._matched + 1) * same
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._matched >= self._needed).any())
