"""Traces of the engine benchmark: every engine gets the same requests of the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PREFIX_TOKENS = 1024
TAIL_TOKENS = 32


@dataclass(frozen=True)
class Ask:
    """One request: continue ``tokens`` greedily by exactly ``new_tokens``."""

    tokens: np.ndarray
    new_tokens: int


@dataclass(frozen=True)
class Trace:
    """One measurement.

    Args:
        kind: ``mixed`` (prompts of 32-511 tokens, 16-255 new tokens), ``shared`` (a common prefix of 1,024
            tokens, then 32 different tokens and 32 new ones), or a kind that only some engines support.
        requests: number of requests.
        seed: seed of the tokens and lengths.
        scale: factor of the lengths of the mixed trace.
        batch: number of requests in a static batch; 0 is continuous batching.
    """

    kind: str
    requests: int
    seed: int = 1
    scale: float = 1.0
    batch: int = 0

    def asks(self) -> list[Ask]:
        """Return the requests; the first of a shared trace fills the prefix cache."""
        rng = np.random.default_rng(self.seed)
        if self.kind == "shared":
            prefix = _tokens(rng, PREFIX_TOKENS)
            tails = [_tokens(rng, TAIL_TOKENS) for _ in range(self.requests + 1)]
            return [Ask(np.concatenate([prefix, tail]), 32) for tail in tails]
        prompts = rng.integers(32, 512, self.requests) * self.scale
        news = rng.integers(16, 256, self.requests) * self.scale
        return [Ask(_tokens(rng, max(1, int(p))), max(1, int(n))) for p, n in zip(prompts, news, strict=True)]

    def static_batches(self) -> list[list[Ask]]:
        """Return groups of ``batch`` requests, each padded to its longest prompt and most new tokens.

        This is request-level batching (Orca, Yu et al., OSDI 2022): finished rows are computed until the
        longest row of the batch is finished, and no request joins before. Only requested tokens count as
        generated.

        Padding is random, because equal padding would be a prefix in an engine's cache.
        """
        asks, groups, rng = self.asks(), [], np.random.default_rng(self.seed)
        for first in range(0, len(asks), self.batch):
            group = asks[first : first + self.batch]
            width = max(len(ask.tokens) for ask in group)
            count = max(ask.new_tokens for ask in group)
            padded = [np.concatenate([_tokens(rng, width - len(a.tokens)), a.tokens]) for a in group]
            groups.append([Ask(tokens, count) for tokens in padded])
        return groups


@dataclass(frozen=True)
class Served:
    """Seconds of the whole trace, and the number of requested tokens."""

    seconds: float
    generated: int


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(2, 7000, count)
