"""The cost of prompt tokens, learned from measured steps, to bound how much prompts slow running streams."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Forgetting factor: about the last 16 steps count.
_DECAY = 0.94
# Minimum prompt chunk beside running streams, in tokens: each chunk reads all weights once.
_MIN_CHUNK = 4
_MAX_TOKENS = 2**31
# Measured prompt tokens before a promise is made: a model's first short prompts are those of its warm-up.
_ENOUGH = 128
# Scale of the features of a step: any decode rows, decode rows, prompts, prompt tokens.
_UNITS = (1.0, 8.0, 1.0, 64.0)
_RIDGE = 1e-4


class PromptCosts:
    """A linear model of a step's duration: decode rows, prompts and prompt tokens.

    It is fitted by least squares with exponential forgetting, since costs change with context and load. Each
    prompt has a fixed cost, since its run reads all weights.
    """

    def __init__(self) -> None:
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
        self._saw_decode = self._saw_prompt = False
        self._seen = 0  # prompt tokens

    def observe(self, rows: int, prompts: int, tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            rows: rows of one token.
            prompts: rows of more tokens.
            tokens: tokens of these.
            seconds: duration of the step.
        """
        # Every step comes here: floats take a fifth of the time of small arrays.
        any_row, row, prompt, token = _UNITS
        facts = (rows > 0) / any_row, rows / row, prompts / prompt, tokens / token
        # Minimize relative errors, so that a rare long step does not outweigh many short ones.
        weight = 1.0 / max(seconds, 1e-9) ** 2
        for i, moments in enumerate(self._moments):
            by = weight * facts[i]
            for j, fact in enumerate(facts):
                moments[j] = _DECAY * moments[j] + by * fact
            self._products[i] = _DECAY * self._products[i] + by * seconds
        self._saw_decode |= rows > 0
        self._saw_prompt |= tokens > 0
        self._seen += tokens

    def prompt_tokens(self, rows: int, stretch: float) -> int | None:
        """Return the prompt tokens that make a step ``stretch`` times as long as ``rows`` decode rows alone.

        None if no decode row or no prompt was measured yet.
        """
        if not (self._saw_decode and self._saw_prompt):
            return None
        once, per_row, per_prompt, per_token = self._solve().tolist()
        decode = once + per_row * rows
        if per_token <= 0.0 or decode <= 0.0:
            return _MIN_CHUNK  # the fit is disturbed; later steps correct it
        # A token may seem to cost next to nothing, so that the quotient is infinite.
        affordable = min(((stretch - 1.0) * decode - per_prompt) / per_token, _MAX_TOKENS)
        return max(_MIN_CHUNK, int(affordable))

    def seconds_per_prompt_token(self) -> float | None:
        """Return the estimated cost of one more prompt token; None if no prompt was measured yet."""
        return max(0.0, float(self._solve()[3])) if self._saw_prompt else None

    def seconds_of_prompts(self, tokens: int) -> float | None:
        """Return the estimated seconds of so many prompt tokens; None before enough were measured."""
        per_token = self.seconds_per_prompt_token() if self._seen >= _ENOUGH else None
        return None if not per_token else tokens * per_token

    def _solve(self) -> npt.NDArray[np.float64]:
        """Return the seconds of each feature; a negative cost per prompt (an ambiguous fit) is dropped."""
        costs = self._fit([0, 1, 2, 3])
        return costs if costs[2] >= 0.0 else self._fit([0, 1, 3])

    def _fit(self, kept: list[int]) -> npt.NDArray[np.float64]:
        moments = np.array(self._moments)[np.ix_(kept, kept)]
        ridge = _RIDGE * np.trace(moments) / len(kept) * np.eye(len(kept))
        costs = np.zeros(4)
        costs[kept] = np.linalg.solve(moments + ridge, np.array(self._products)[kept])
        return np.asarray(costs / _UNITS)
