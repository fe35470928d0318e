"""What workers measure of models that see: drawn pages, and questions on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUESTION = "What is the total of this invoice, and who sent it?"


@dataclass(frozen=True)
class PageWork:
    """One question.

    Args:
        kind: ``page`` asks about a new page, ``second`` asks again about it, ``text`` asks without a page,
            ``beside`` decodes a text while a new page is asked about.
        seed: of the page.
        height: pixels.
        width: pixels.
        new_tokens: tokens of the answer.
    """

    kind: str
    seed: int
    height: int = 700
    width: int = 1000
    new_tokens: int = 8

    def pixels(self) -> np.ndarray:
        """Return a page, uint8 [height, width, 3]: dark strokes on light paper."""
        rng = np.random.default_rng(self.seed)
        page = np.full((self.height, self.width, 3), 235, np.uint8)
        for _ in range(400):
            top, left = rng.integers(0, self.height - 8), rng.integers(0, self.width - 30)
            page[top : top + rng.integers(2, 8), left : left + rng.integers(2, 30)] = rng.integers(0, 90)
        return page

    def question(self) -> str:
        """Return another question for each kind, so that no answer is known."""
        return f"{QUESTION} ({self.kind} {self.seed})"


@dataclass(frozen=True)
class PageTiming:
    """The time of an answer.

    Args:
        first_token_s: until the first token.
        processor_s: processor time of all threads until the first token.
        step_s: the median between later tokens.
        prompt_tokens: with those of the picture.
        gaps_s: between tokens of the request beside it; empty without one.
    """

    first_token_s: float
    processor_s: float
    step_s: float
    prompt_tokens: int
    gaps_s: tuple[float, ...] = ()
