"""Which proposals are worth their cost.

A step lasts longer with proposals, and gives more tokens if they are accepted. Both are learned, and a
proposal is made where the tokens expected from it would take longer to decode one by one. Where that is not
so, a small share of the time buys trials, so that a request whose text changes is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .acceptance import Acceptance
from .costs import StepCosts
from .proposer import Proposer

_MOST_IN_A_ROW = 100  # steps with proposals, then two plain ones: the second tells what such cost by now
_TRIAL_SHARE = 0.005  # of the time, for proposals that are not expected to pay
_TRIAL_TOKENS = 2
_SUREST = 0.99
_LOSS_SHARE = 0.005  # of the time, the most that proposals may cost, whatever was expected of them
_MOST_SAVED = 10.0  # plain steps' worth of past gains that may be lost again, and of credit to begin with
_MOST_LOST = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal that could be made for the row at ``index``, of ``most`` tokens."""

    index: int
    request_id: str
    proposer: Proposer
    evidence: object
    most: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal of ``proposed`` tokens."""

    candidate: Candidate
    proposed: int
    accepted: int
    rejected: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """Lengths of proposals by candidate, the tokens expected to be accepted, and the seconds they add."""

    counts: dict[int, int]
    tokens: float
    seconds: float


_NOTHING = _Choice({}, 0.0, 0.0)


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
        self._in_a_row = 0
        self._rests = False  # the next step is to be plain, to be measured
        self._entry = 0.0  # seconds that leaving plain steps costs, whatever is proposed

    def choose(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """Tokens to propose for each candidate, in a step of ``rows`` decoding rows."""
        plain = self.costs.plain(rows)
        counts = [0] * len(candidates)
        if plain is None or not candidates:
            return counts  # without a measure there is no telling
        if self._account is None:
            self._account = _MOST_SAVED * plain
            self._trial_budget = plain
        if self._account < 0.0 or self._rests or self._in_a_row >= _MOST_IN_A_ROW:
            return counts
        self._entry = 0.0 if self._in_a_row else self.costs.aftermath(rows)
        promising = any(self._could_pay(candidate, rows, plain / rows) for candidate in candidates)
        chosen = self._most_saved(candidates, rows, plain / rows) if promising else _NOTHING
        if chosen.counts:
            # A token is worth the time that it takes at the speed reached so (Dinkelbach, 1967).
            faster = (plain + chosen.seconds) / (rows + chosen.tokens)
            chosen = self._most_saved(candidates, rows, faster, chosen)
        else:
            chosen = self._trial(candidates, rows)
        for i, count in chosen.counts.items():
            counts[i] = count
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
            self.acceptance.observe(where.request_id, where.evidence, each.accepted, rejected=each.rejected)
        follows, self._rests = self._in_a_row > 0, self._in_a_row >= _MOST_IN_A_ROW and not outcomes
        self._in_a_row = self._in_a_row + 1 if outcomes else 0
        if seconds is None:
            return
        if not outcomes:
            self.costs.observe_plain(rows, seconds, follows=follows)
        plain = self.costs.plain(rows)
        if plain is None or self._account is None:
            return
        gain = -self.costs.aftermath(rows) if follows and not outcomes else 0.0
        if len({each.candidate.proposer for each in outcomes}) == 1:
            proposed = sum(each.proposed for each in outcomes)
            proposer = outcomes[0].candidate.proposer
            took = self.costs.observe(proposer, rows, len(outcomes), proposed, seconds)
            gain = sum(each.accepted for each in outcomes) * plain / rows - (took - plain)
        balance = self._account + gain + _LOSS_SHARE * plain
        self._account = max(-_MOST_LOST * plain, min(_MOST_SAVED * plain, balance))
        self._trial_budget += _TRIAL_SHARE * plain

    def charge(self, seconds: float) -> None:
        """Take note of time that proposers spent before they could propose anything."""
        if self._account is not None:
            self._account -= seconds

    def _could_pay(self, candidate: Candidate, rows: int, value: float) -> bool:
        """Whether a proposal would pay if its tokens after the first were free: a cheap look ahead."""
        rate = min(self.acceptance.rate(candidate.request_id, candidate.evidence), _SUREST)
        most = value * rate / (1.0 - rate)
        return most > self._entry + self.costs.added(candidate.proposer, rows, 1, 1)

    def _most_saved(
        self, candidates: Sequence[Candidate], rows: int, value: float, default: _Choice | None = None
    ) -> _Choice:
        """The proposals that together save most, where a token is worth ``value`` seconds."""
        ranked = sorted(
            ((*self._best(candidate, rows, value), i) for i, candidate in enumerate(candidates)), reverse=True
        )
        best, chosen, saved = 0.0, default or _NOTHING, 0.0
        total, tokens = 0, 0.0
        for number, (saves, count, expected, i) in enumerate(ranked, start=1):
            saved, total, tokens = saved + saves, total + count, tokens + expected
            proposer = candidates[i].proposer
            balance = saved - self.costs.added(proposer, rows, number, 0) - self._entry
            if balance > best:
                best = balance
                counts = {place: count for _, count, _, place in ranked[:number]}
                added = self._entry + self.costs.added(proposer, rows, number, total)
                chosen = _Choice(counts, tokens, added)
        return chosen

    def _best(self, candidate: Candidate, rows: int, value: float) -> tuple[float, int, float]:
        """What the best length of a proposal saves, its row's own cost aside; that length; tokens accepted.

        The n-th token is accepted with probability rate^n, so that it pays as long as this share of a token's
        value exceeds what verifying it costs.
        """
        rate = min(self.acceptance.rate(candidate.request_id, candidate.evidence), _SUREST)
        cost = self.costs.token(candidate.proposer, rows)
        share = min(1.0, cost / value)
        count = candidate.most if share <= 0.0 else int(math.log(share) / math.log(rate))
        count = max(1, min(count, candidate.most))
        expected = rate * (1.0 - rate**count) / (1.0 - rate)
        return value * expected - cost * count, count, expected

    def _trial(self, candidates: Sequence[Candidate], rows: int) -> _Choice:
        """A proposal that is not expected to pay, if the budget for trials allows."""
        if self._trial_budget < self.costs.token(candidates[0].proposer, rows):
            return _NOTHING
        rates = [self.acceptance.rate(each.request_id, each.evidence) for each in candidates]
        i = max(range(len(candidates)), key=rates.__getitem__)
        count = min(_TRIAL_TOKENS, candidates[i].most)
        cost = self._entry + self.costs.added(candidates[i].proposer, rows, 1, count)
        if cost > self._trial_budget:
            return _NOTHING
        self._trial_budget = 0.0  # what was saved up in good times is no reason for several in a row
        return _Choice({i: count}, 0.0, cost)
