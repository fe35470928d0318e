"""Mirostat 2: text of a constant surprise (Basu et al., arXiv:2007.14966, algorithm 2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Mirostat:
    """Moves the most surprise a token may have, so that the tokens' own comes to the target.

    Args:
        target: bits of surprise a token (the paper's tau).
        rate: how fast the bound follows (its eta).
        temperature: divides the logits first.
    """

    def __init__(self, target: float, rate: float, temperature: float) -> None:
        self.max_surprise = 2.0 * target
        self._target, self._rate, self._temperature = target, rate, temperature

    def surprise(self, logits: npt.NDArray[np.float32], token: int) -> float:
        """Bits of surprise of ``token`` under ``logits`` [vocab_size]."""
        scaled = (logits - logits.max()) / np.float32(self._temperature)
        return float(np.log2(np.exp(scaled).sum()) - float(scaled[token]) / np.log(2.0))

    def observe(self, surprise: float) -> None:
        """Take note of how surprising the token was that was generated."""
        self.max_surprise -= self._rate * (surprise - self._target)
