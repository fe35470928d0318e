"""What steps cost, learned from the steps themselves, so that prompts do not slow running streams down."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Weight of a step in the next one's estimate: about the last 16 steps count.
_DECAY = 0.94
# Prompts are cut no smaller than this beside running streams: each piece reads all weights once.
_LEAST_PIECE = 4
_MOST_TOKENS = 2**31
# Facts of a step: whether rows decode, how many, prompts, their tokens; in units that make them alike.
_UNITS = np.array([1.0, 8.0, 1.0, 64.0])
_RIDGE = 1e-4


class PromptCosts:
    """Seconds of a step as a linear function of its decode rows, its prompts and their tokens.

    A prompt's run reads all weights, whatever its length. Fitted by least squares with exponential
    forgetting, since costs change with context and load.
    """

    def __init__(self) -> None:
        self._moments = np.zeros((4, 4))
        self._products = np.zeros(4)
        self._saw_decode = self._saw_prompt = False

    def observe(self, rows: int, prompts: int, tokens: int, seconds: float) -> None:
        """Note a step.

        Args:
            rows: requests that got one token computed.
            prompts: requests beside them.
            tokens: theirs.
            seconds: how long it took.
        """
        facts = np.array([rows > 0, rows, prompts, tokens], np.float64) / _UNITS
        # Relative errors count, so that a rare long step does not outweigh many short ones.
        weight = 1.0 / max(seconds, 1e-9) ** 2
        self._moments = _DECAY * self._moments + weight * np.outer(facts, facts)
        self._products = _DECAY * self._products + weight * seconds * facts
        self._saw_decode |= rows > 0
        self._saw_prompt |= tokens > 0

    def prompt_tokens(self, rows: int, stretch: float) -> int | None:
        """Tokens of a prompt that make a step ``stretch`` times as long as ``rows`` alone; None: unknown."""
        if not (self._saw_decode and self._saw_prompt):
            return None
        once, per_row, per_prompt, per_token = self._solve().tolist()
        decode = once + per_row * rows
        if per_token <= 0.0 or decode <= 0.0:
            return _LEAST_PIECE  # disturbed steps; the next ones will tell
        # A token may seem to cost next to nothing, so that the quotient is infinite.
        affordable = min(((stretch - 1.0) * decode - per_prompt) / per_token, _MOST_TOKENS)
        return max(_LEAST_PIECE, int(affordable))

    def seconds_per_prompt_token(self) -> float | None:
        """Estimated cost of computing one more prompt token; None: unknown."""
        return max(0.0, float(self._solve()[3])) if self._saw_prompt else None

    def _solve(self) -> npt.NDArray[np.float64]:
        """Seconds for each fact; a prompt costs at least 0, which prompts of one size leave open."""
        costs = self._fit([0, 1, 2, 3])
        return costs if costs[2] >= 0.0 else self._fit([0, 1, 3])

    def _fit(self, kept: list[int]) -> npt.NDArray[np.float64]:
        moments = self._moments[np.ix_(kept, kept)]
        ridge = _RIDGE * np.trace(moments) / len(kept) * np.eye(len(kept))
        costs = np.zeros(4)
        costs[kept] = np.linalg.solve(moments + ridge, self._products[kept])
        return np.asarray(costs / _UNITS)
