"""Mirostat 2: text of a constant surprise (Basu et al., arXiv:2007.14966, algorithm 2)."""

from __future__ import annotations


class Mirostat:
    """Moves the most surprise a token may have, so that the tokens' own comes to the target.

    Args:
        target: bits of surprise a token (the paper's tau).
        rate: how fast the bound follows (its eta).
    """

    def __init__(self, target: float, rate: float) -> None:
        self.max_surprise = 2.0 * target
        self._target, self._rate = target, rate

    def observe(self, surprise: float) -> None:
        """Take note of how surprising the token was that was generated."""
        self.max_surprise -= self._rate * (surprise - self._target)
