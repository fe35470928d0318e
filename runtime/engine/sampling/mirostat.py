"""Mirostat 2: keep the surprise of the text near a target (Basu et al., arXiv:2007.14966, algorithm 2)."""

from __future__ import annotations


class Mirostat:
    """Adjusts the maximum surprise of a token, so that the surprise of the text approaches the target.

    Args:
        target: bits of surprise per token (tau in the paper).
        rate: learning rate (eta in the paper).
    """

    def __init__(self, target: float, rate: float) -> None:
        self.max_surprise = 2.0 * target
        self._target, self._rate = target, rate

    def observe(self, surprise: float) -> None:
        """Update the maximum with the surprise of a generated token, in bits."""
        self.max_surprise -= self._rate * (surprise - self._target)
