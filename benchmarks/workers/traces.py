"""What the engine benchmark asks of every engine: the same requests, made of the same seed."""

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
        kind: ``mixed`` (prompts of 32-511 tokens, 16-255 new ones), ``shared`` (a common beginning of 1,024
            tokens, 32 own, 32 new), or one that only some engines know.
        requests: how many.
        seed: another seed is another trace.
        scale: lengths of the mixed trace are multiplied with it.
        batch: requests of a static batch; 0 is continuous batching.
    """

    kind: str
    requests: int
    seed: int = 1
    scale: float = 1.0
    batch: int = 0

    def asks(self) -> list[Ask]:
        """The requests; those of a shared trace begin with one that warms the prefix cache."""
        rng = np.random.default_rng(self.seed)
        if self.kind == "shared":
            prefix = _tokens(rng, PREFIX_TOKENS)
            tails = [_tokens(rng, TAIL_TOKENS) for _ in range(self.requests + 1)]
            return [Ask(np.concatenate([prefix, tail]), 32) for tail in tails]
        prompts = rng.integers(32, 512, self.requests) * self.scale
        news = rng.integers(16, 256, self.requests) * self.scale
        return [Ask(_tokens(rng, max(1, int(p))), max(1, int(n))) for p, n in zip(prompts, news, strict=True)]

    def static_batches(self) -> list[list[Ask]]:
        """Groups of ``batch`` requests, each padded to its longest prompt and most new tokens.

        That is batching by request, as Orca (Yu et al., OSDI 2022) describes what it replaces: rows that are
        done are computed on until the longest of their batch is, and nobody joins before. Only tokens that
        were asked for count as generated.

        Padding is random: equal paddings would be a prefix that an engine's cache serves.
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
    """Seconds for the whole trace, and the tokens that were asked for."""

    seconds: float
    generated: int


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(2, 7000, count)
