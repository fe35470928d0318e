"""Beam search as in Hugging Face transformers (``generate(num_beams=...)``), without a model."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Literal

from ....errors import InvalidSamplingError
from ....options import shown
from ....records import dataclass

_MAX_PENALTY = 50.0  # 10**6 tokens to this power is still a finite float64


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOptions:
    """Options of a beam search.

    Args:
        num_beams: number of beams kept at each step.
        max_tokens: maximum tokens of a beam.
        length_penalty: the exponent of the length by which a beam's log-probability is divided; values above
            0 favour longer beams.
        early_stopping: when the search ends. True: as soon as ``num_beams`` beams are finished. False: when
            the best running beam, at its present length, cannot beat them. "never": when it cannot at any
            length.

    Raises:
        InvalidSamplingError: an option is out of range.
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
                f"num_beams and max_tokens must be whole numbers of at least 1, not {wrong}"
            )
        if (
            not isinstance(self.length_penalty, Real)
            or not -_MAX_PENALTY <= self.length_penalty <= _MAX_PENALTY
        ):
            raise InvalidSamplingError(
                f"length_penalty must be in [-{_MAX_PENALTY}, {_MAX_PENALTY}], "
                f"not {shown(self.length_penalty)}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingError(
                f"early_stopping must be True, False or 'never', not {shown(self.early_stopping)}"
            )


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of generated tokens and its log-probability; ``score`` is set when it is finished."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = 0.0


class BeamSearch:
    """The beam search of one prompt; call ``advance`` with log-probabilities of ``running`` until ``done``.

    Args:
        options: options of the search.
        end_token_ids: tokens that finish a beam.
    """

    def __init__(self, options: BeamSearchOptions, end_token_ids: Collection[int]) -> None:
        self.running = [Beam()]
        self.finished: list[Beam] = []  # best first
        self.done = False
        self._options = options
        self._ends = frozenset(end_token_ids)

    @property
    def num_candidates(self) -> int:
        """The number of tokens to consider per running beam: enough even if all end tokens rank first."""
        return max(2, 1 + len(self._ends)) * self._options.num_beams

    def advance(self, logprobs: Sequence[Mapping[int, float]]) -> None:
        """Extend the running beams by one token.

        Args:
            logprobs: per running beam, the log-probabilities of its ``num_candidates`` most likely tokens.
        """
        grown = [
            Beam((*beam.token_ids, token), beam.logprob + logprob)
            for beam, choices in zip(self.running, logprobs, strict=True)
            for token, logprob in choices.items()
        ]
        best = heapq.nlargest(self.num_candidates, grown, key=lambda beam: beam.logprob)
        complete = [self._is_complete(beam) for beam in best]
        # Only the first ``num_beams`` candidates may finish; the others only replace finished ones.
        for beam, ends in zip(best[: self._options.num_beams], complete, strict=False):
            if ends:
                self._finish(beam)
        open_beams = [beam for beam, ends in zip(best, complete, strict=True) if not ends]
        self.running = open_beams[: self._options.num_beams]
        self.done = not self.running or not self._can_improve()

    def ends(self, beam: Beam) -> bool:
        """Whether the last token of a beam is an end token."""
        return beam.token_ids[-1] in self._ends

    def _is_complete(self, beam: Beam) -> bool:
        return self.ends(beam) or len(beam.token_ids) >= self._options.max_tokens

    def _finish(self, beam: Beam) -> None:
        complete = Beam(beam.token_ids, beam.logprob, self._score(beam, len(beam.token_ids)))
        self.finished = sorted([*self.finished, complete], key=lambda beam: -beam.score)
        del self.finished[self._options.num_beams :]

    def _can_improve(self) -> bool:
        """Whether a running beam can still enter the finished ones."""
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
