"""Beam search as Hugging Face transformers does it (``generate(num_beams=...)``), apart from any model."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from ....errors import InvalidSamplingError
from ....options import shown

_MOST_PENALTY = 50.0  # a million tokens to this power are still a number


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOptions:
    """How to search.

    Args:
        num_beams: continuations kept at each step.
        max_tokens: most tokens of one.
        length_penalty: log-probabilities are compared after division by this power of the length; above 0
            favours longer ones.
        early_stopping: True ends as soon as ``num_beams`` are complete; False when the best open one, at its
            present length, cannot beat them; "never" when it could not at any length.

    Raises:
        InvalidSamplingError: an option is out of its range.
    """

    num_beams: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        counts = self.num_beams, self.max_tokens
        if not all(isinstance(count, int) and count > 0 for count in counts):
            wrong = ", ".join(map(shown, counts))
            raise InvalidSamplingError(
                f"num_beams and max_tokens must be positive whole numbers, not {wrong}"
            )
        if (
            not isinstance(self.length_penalty, Real)
            or not -_MOST_PENALTY <= self.length_penalty <= _MOST_PENALTY
        ):
            raise InvalidSamplingError(
                f"length_penalty must be within {_MOST_PENALTY}, not {shown(self.length_penalty)}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingError(
                f"early_stopping is True, False or 'never', not {shown(self.early_stopping)}"
            )


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation and its log-probability; ``score`` is set once it is complete."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = 0.0


class BeamSearch:
    """One prompt's search: ``advance`` it with what the model says of ``running`` until it is ``done``.

    Args:
        options: how to search.
        end_token_ids: tokens that complete a continuation.
    """

    def __init__(self, options: BeamSearchOptions, end_token_ids: Collection[int]) -> None:
        self.running = [Beam()]
        self.finished: list[Beam] = []  # best first
        self.done = False
        self._options = options
        self._ends = frozenset(end_token_ids)

    @property
    def num_candidates(self) -> int:
        """How many tokens of each running continuation to weigh: enough, even if the best of all are ends."""
        return max(2, 1 + len(self._ends)) * self._options.num_beams

    def advance(self, logprobs: Sequence[Mapping[int, float]]) -> None:
        """Go on by one token.

        Args:
            logprobs: for each running continuation, those of its ``num_candidates`` likeliest tokens.
        """
        grown = [
            Beam((*beam.token_ids, token), beam.logprob + logprob)
            for beam, choices in zip(self.running, logprobs, strict=True)
            for token, logprob in choices.items()
        ]
        best = heapq.nlargest(self.num_candidates, grown, key=lambda beam: beam.logprob)
        complete = [self._is_complete(beam) for beam in best]
        # Those beyond the first are there to go on with, not to end with.
        for beam, ends in zip(best[: self._options.num_beams], complete, strict=False):
            if ends:
                self._finish(beam)
        open_beams = [beam for beam, ends in zip(best, complete, strict=True) if not ends]
        self.running = open_beams[: self._options.num_beams]
        self.done = not self.running or not self._can_improve()

    def ends(self, beam: Beam) -> bool:
        """Whether an end token completed it."""
        return beam.token_ids[-1] in self._ends

    def _is_complete(self, beam: Beam) -> bool:
        return self.ends(beam) or len(beam.token_ids) >= self._options.max_tokens

    def _finish(self, beam: Beam) -> None:
        complete = Beam(beam.token_ids, beam.logprob, self._score(beam, len(beam.token_ids)))
        self.finished = sorted([*self.finished, complete], key=lambda beam: -beam.score)
        del self.finished[self._options.num_beams :]

    def _can_improve(self) -> bool:
        """Whether an open continuation may still come among the finished ones."""
        if len(self.finished) < self._options.num_beams:
            return True
        if self._options.early_stopping is True:
            return False
        best = self.running[0]
        farthest = self._options.early_stopping == "never" and self._options.length_penalty > 0
        length = self._options.max_tokens if farthest else len(best.token_ids)
        return self._score(best, length) > self.finished[-1].score

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / length**self._options.length_penalty)
