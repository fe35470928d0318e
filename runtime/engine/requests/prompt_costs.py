"""The cost of prompt tokens, learned from measured steps, to bound how much prompts slow running streams."""

from __future__ import annotations

import math
from operator import mul

# Earlier steps of a kind count as at most so many.
_MEMORY = 16.0
# A step counts as at most so many times as long as expected: other work of the machine only adds time.
_OUTLIER = 4.0
# Minimum prompt chunk beside running streams, in tokens: each chunk reads all weights once.
_MIN_CHUNK = 4
_MAX_TOKENS = 2**31
# Measured prompt tokens before a promise is made: a model's first short prompts are those of its warm-up.
_ENOUGH = 128
# Scale of the features of a step: any decode rows, decode rows, prompts, prompt tokens.
_UNITS = (1.0, 8.0, 1.0, 64.0)
# Standard deviation of each cost before any step was measured, in durations of the first step.
_PRIOR = 100.0


class PromptCosts:
    """A linear model of a step's duration: decode rows, prompts and prompt tokens.

    Each prompt has a fixed cost, since its run reads all weights. Costs change with context and load, so
    old steps are forgotten, but only in favour of steps that tell the same (recursive least squares with
    directional forgetting: Kulhavy, "Restricted exponential forgetting in real-time identification",
    Automatica 23, 1987). With one forgetting factor for all, a few hundred decode steps would leave nothing
    of what prompts cost, and pieces of one length nothing of what tells a prompt's fixed cost from that of
    its tokens.
    """

    def __init__(self) -> None:
        self._costs = [0.0] * 4  # seconds of each feature, in its unit
        self._covariance: list[list[float]] = []
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
        self._learn(((rows > 0) / any_row, rows / row, prompts / prompt, tokens / token), max(seconds, 1e-9))
        self._saw_decode |= rows > 0
        self._saw_prompt |= tokens > 0
        self._seen += tokens

    @property
    def known(self) -> bool:
        """Whether decode rows and prompts were measured."""
        return self._saw_decode and self._saw_prompt

    def prompt_tokens(self, rows: int, stretch: float) -> int | None:
        """Return the prompt tokens that make a step ``stretch`` times as long as ``rows`` decode rows alone.

        None if no decode row or no prompt was measured yet.
        """
        if not self.known:
            return None
        once, per_row, per_prompt, per_token = self._solve()
        decode = once + per_row * rows
        if per_token <= 0.0 or decode <= 0.0:
            return _MIN_CHUNK  # the fit is disturbed; later steps correct it
        # A token may seem to cost next to nothing, so that the quotient is infinite.
        affordable = min(((stretch - 1.0) * decode - per_prompt) / per_token, _MAX_TOKENS)
        return max(_MIN_CHUNK, int(affordable))

    def seconds_per_prompt_token(self) -> float | None:
        """Return the estimated cost of one more prompt token; None before it can be told from noise."""
        per_token = self._solve()[3] if self._saw_prompt else 0.0
        return per_token if per_token > 0.0 else None

    def seconds_of_prompts(self, tokens: int) -> float | None:
        """Return the estimated seconds of so many prompt tokens; None before enough were measured."""
        per_token = self.seconds_per_prompt_token() if self._seen >= _ENOUGH else None
        return None if not per_token else tokens * per_token

    def seconds_beside(self, tokens: int, rows: int, stretch: float) -> float | None:
        """Return the estimated seconds until a prompt is computed beside ``rows`` streams.

        Its steps are ``stretch`` times as long as without it. None before enough was measured.
        """
        alone = self.seconds_of_prompts(tokens)
        if alone is None or not rows or stretch == math.inf:
            return alone
        chunk = self.prompt_tokens(rows, stretch)
        if chunk is None:
            return alone
        once, per_row, per_prompt, per_token = self._solve()
        step = once + per_row * rows + per_prompt + per_token * min(chunk, tokens)
        return max(alone, step * tokens / chunk)

    def _learn(self, facts: tuple[float, ...], seconds: float) -> None:
        """Correct costs and covariance by one duration (a Kalman filter's update of a scalar)."""
        if not any(facts):
            return
        if not self._covariance:
            prior = (_PRIOR * seconds) ** 2
            self._covariance = [[prior * (i == j) for j in range(4)] for i in range(4)]
        spread = [sum(map(mul, line, facts)) for line in self._covariance]
        variance = sum(map(mul, spread, facts))  # of the expected duration
        expected = sum(map(mul, self._costs, facts))
        seconds = min(seconds, _OUTLIER * math.hypot(expected, math.sqrt(variance)))
        # Minimize relative errors, so that a rare long step does not outweigh many short ones.
        noise = seconds**2
        # What exceeds the memory is forgotten: the variance grows in the direction of these facts only.
        growth = max(0.0, noise / (_MEMORY * variance) - 1.0)
        gain = (1.0 + growth) / (variance * (1.0 + growth) + noise)
        change = growth / variance - gain * (1.0 + growth)
        for i, line in enumerate(self._covariance):
            self._costs[i] += gain * spread[i] * (seconds - expected)
            for j in range(4):
                line[j] += change * (spread[i] * spread[j])

    def _solve(self) -> list[float]:
        """Return the seconds of each feature; a negative cost per prompt (an ambiguous fit) is dropped."""
        costs = self._costs
        if costs[2] < 0.0:
            # The estimate under the condition that a prompt costs nothing.
            by = costs[2] / self._covariance[2][2]
            costs = [cost - by * line[2] for cost, line in zip(costs, self._covariance, strict=True)]
            costs[2] = 0.0
        return [cost / unit for cost, unit in zip(costs, _UNITS, strict=True)]
