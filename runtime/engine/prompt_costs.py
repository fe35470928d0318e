"""What steps cost, learned from the steps themselves, so that prompts do not slow running streams down."""

from __future__ import annotations

import numpy as np

# Weight of a step in the next one's estimate: about the last 16 steps count.
_DECAY = 0.94
# Prompts are cut no smaller than this beside running streams: each piece reads all weights once.
_LEAST_PIECE = 8


class PromptCosts:
    """Seconds of a step as a linear function of its decode rows and its prompt tokens.

    Fitted by least squares with exponential forgetting, since costs change with context and load.
    """

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._saw_decode = self._saw_prompt = False

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Note a step.

        Args:
            rows: requests that got one token computed.
            tokens: prompt tokens beside them.
            seconds: how long it took.
        """
        facts = np.array([rows > 0, rows, tokens], np.float64)
        # Relative errors count, so that a rare long step does not outweigh many short ones.
        weight = 1.0 / max(seconds, 1e-9) ** 2
        self._moments = _DECAY * self._moments + weight * np.outer(facts, facts)
        self._products = _DECAY * self._products + weight * seconds * facts
        self._saw_decode |= rows > 0
        self._saw_prompt |= tokens > 0

    def prompt_tokens(self, rows: int, stretch: float) -> int | None:
        """How many prompt tokens make a step ``stretch`` times as long as ``rows`` alone; None: unknown."""
        if not (self._saw_decode and self._saw_prompt):
            return None
        ridge = 1e-6 * np.trace(self._moments) * np.eye(3)
        once, per_row, per_token = np.linalg.solve(self._moments + ridge, self._products)
        decode = once + per_row * rows
        if per_token <= 0.0 or decode <= 0.0:
            return None
        return max(_LEAST_PIECE, int((stretch - 1.0) * decode / per_token))

    def seconds_per_prompt_token(self) -> float | None:
        """Estimated cost of computing one more prompt token; None: unknown."""
        if not self._saw_prompt:
            return None
        ridge = 1e-6 * np.trace(self._moments) * np.eye(3)
        return max(0.0, float(np.linalg.solve(self._moments + ridge, self._products)[2]))
