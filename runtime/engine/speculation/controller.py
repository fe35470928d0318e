"""Which proposals are worth their cost.

A step lasts longer with proposals, and gives more tokens if they are accepted. Both are learned, and a proposal
is made where the tokens expected from it would take longer to decode one by one. Where that is not so, a small
share of the time buys trials, so that a request whose text changes is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import Acceptance
from .costs import StepCosts
from .proposer import Proposer

_TRIAL_SHARE = 0.01  # of the time, for proposals that are not expected to pay
_TRIAL_TOKENS = 2
_LOSS_SHARE = 0.015  # of the time, the most that proposals may cost, whatever was expected of them
_MOST_SAVED = 6.0  # plain steps' worth of past gains that may be lost again
_FREE_LOSS = 3.0  # the same for a beginner


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal that could be made for the row at ``index``, of ``most`` tokens."""

    index: int
    request_id: str
    proposer: Proposer
    evidence: int
    most: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal of ``proposed`` tokens."""

    candidate: Candidate
    proposed: int
    accepted: int
    rejected: bool


class Controller:
    """Chooses the length of each proposal, 0 for none.

    Args:
        batched: whether the provider verifies rows of several tokens together with all others.
    """

    def __init__(self, *, batched: bool) -> None:
        self.acceptance = Acceptance()
        self.costs = StepCosts(batched=batched)
        self._trial_budget = 0.0  # seconds
        self._account: float | None = None  # seconds gained so far, within limits

    def choose(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """Tokens to propose for each candidate, in a step of ``rows`` decoding rows."""
        plain = self.costs.plain(rows)
        counts = [0] * len(candidates)
        if plain is None or not candidates:
            return counts  # without a measure there is no telling
        if self._account is None:
            self._account = _FREE_LOSS * plain
            self._trial_budget = plain
        if self._account < 0.0:
            return counts
        ranked = sorted(
            ((*self._best(candidate, plain, rows), i) for i, candidate in enumerate(candidates)), reverse=True
        )
        for _, count, i in ranked[: self._how_many(ranked, candidates, rows)]:
            counts[i] = count
        if not any(counts):
            self._try(candidates, ranked[0][2], rows, counts)
        return counts

    def learn(self, outcomes: Sequence[Outcome], rows: int, seconds: float | None) -> None:
        """Take note of a step.

        Args:
            outcomes: of its proposals; none in a plain step.
            rows: rows that decoded.
            seconds: its duration; None where it did more than decode.
        """
        for each in outcomes:
            where = each.candidate
            self.acceptance.observe(
                where.request_id, where.evidence, each.accepted, rejected=each.rejected
            )
        if seconds is None:
            return
        if not outcomes:
            self.costs.observe_plain(rows, seconds)
        plain = self.costs.plain(rows)
        if plain is None or self._account is None:
            return
        gain = 0.0
        if len({each.candidate.proposer for each in outcomes}) == 1:
            proposed = sum(each.proposed for each in outcomes)
            proposer = outcomes[0].candidate.proposer
            took = self.costs.observe(proposer, rows, len(outcomes), proposed, seconds)
            gain = sum(each.accepted for each in outcomes) * plain / rows - (took - plain)
        self._account = min(_MOST_SAVED * plain, self._account + gain + _LOSS_SHARE * plain)
        self._trial_budget = min(2 * plain, self._trial_budget + _TRIAL_SHARE * plain)

    def _best(self, candidate: Candidate, plain: float, rows: int) -> tuple[float, int]:
        """Seconds that the best length of a proposal saves, its row's own cost aside, and that length.

        The n-th token is accepted with probability rate^n, so that it pays as long as this share of the
        time that a token takes otherwise exceeds what verifying it costs.
        """
        rate = min(self.acceptance.rate(candidate.request_id, candidate.evidence), 0.99)
        value = plain / rows
        _, cost = self.costs.coefficients(candidate.proposer, rows)
        count = candidate.most if cost <= 0.0 else int(math.log(min(1.0, cost / value)) / math.log(rate))
        count = max(1, min(count, candidate.most))
        return value * _expected(rate, count) - cost * count, count

    def _how_many(
        self, ranked: Sequence[tuple[float, int, int]], candidates: Sequence[Candidate], rows: int
    ) -> int:
        """How many of the ranked proposals together save most."""
        best, chosen, saved = 0.0, 0, 0.0
        for number, (saves, _, i) in enumerate(ranked, start=1):
            saved += saves
            total = saved - self.costs.extra(candidates[i].proposer, rows, number, 0)
            if total > best:
                best, chosen = total, number
        return chosen

    def _try(self, candidates: Sequence[Candidate], i: int, rows: int, counts: list[int]) -> None:
        """Make a proposal that is not expected to pay, if the budget for trials allows."""
        count = min(_TRIAL_TOKENS, candidates[i].most)
        cost = self.costs.extra(candidates[i].proposer, rows, 1, count)
        if cost <= self._trial_budget:
            self._trial_budget -= cost
            counts[i] = count


def _expected(rate: float, count: int) -> float:
    """Tokens accepted of ``count``, each with ``rate`` once those before it were."""
    return rate * (1.0 - rate**count) / (1.0 - rate)
