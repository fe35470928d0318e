"""Choose the length of each proposal by its expected gain and cost.

Verifying proposals makes a step longer, and accepted tokens save later steps. Costs and acceptance rates are
learned. A proposal is made if decoding its expected tokens one by one would take longer. Otherwise a small
share of the time is spent on trials, so that a change of the text is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....records import dataclass
from .acceptance import Acceptance
from .costs import StepCosts
from .proposer import Proposer

# After this many consecutive steps with proposals, two plain steps follow; the second measures their cost.
_MAX_CONSECUTIVE = 100
_TRIAL_SHARE = 0.01  # of the time, for proposals of one token that are not expected to save time
_MAX_RATE = 0.99
_LOSS_SHARE = 0.005  # of the time, the maximum loss by proposals in the long run
_CREDIT = 1.0  # plain steps that may be lost before anything is gained: 3 % of a text of 40 tokens
_MAX_CREDIT = 10.0  # plain steps of past gains that may be lost again
_MAX_DEBT = 2.0  # plain steps


@dataclass(frozen=True, slots=True)
class ProposalCandidate:
    """A possible proposal of up to ``most`` tokens for the plan's row at ``index``."""

    index: int
    request_id: str
    proposer: Proposer
    evidence: object
    most: int


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a proposal of ``proposed`` tokens."""

    candidate: ProposalCandidate
    proposed: int
    accepted: int
    rejected: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """Proposal lengths by candidate, the expected number of accepted tokens, and the added seconds."""

    counts: dict[int, int]
    tokens: float
    seconds: float


_NOTHING = _Choice({}, 0.0, 0.0)


class Controller:
    """Choose the length of each proposal; 0 means none.

    Args:
        batched: whether the runner runs rows of several tokens together with all other rows.
    """

    def __init__(self, *, batched: bool) -> None:
        self.acceptance = Acceptance()
        self.costs = StepCosts(batched=batched)
        self._trial_budget = 0.0  # seconds
        self._account: float | None = None  # seconds gained so far, within [-_MAX_DEBT, _MAX_CREDIT] steps
        self._consecutive = 0  # steps with proposals
        self._rests = False  # the next step must be plain, to be measured
        self._entry = 0.0  # seconds that the switch from plain steps costs

    def choose(self, candidates: Sequence[ProposalCandidate], rows: int) -> list[int]:
        """Return the number of tokens to propose for each candidate in a step of ``rows`` decode rows."""
        plain = self.costs.plain(rows)
        counts = [0] * len(candidates)
        if plain is None or not candidates:
            return counts  # the cost of a plain step is unknown
        if self._account is None:
            self._account = _CREDIT * plain
        if self._account < 0.0 or self._rests or self._consecutive >= _MAX_CONSECUTIVE:
            return counts
        self._entry = 0.0 if self._consecutive else self.costs.transition(rows)
        promising = any(self._could_pay(candidate, rows, plain / rows) for candidate in candidates)
        chosen = self._most_saved(candidates, rows, plain / rows) if promising else _NOTHING
        if chosen.counts:
            # The value of a token is its time at the speed reached with this choice (Dinkelbach, 1967).
            faster = (plain + chosen.seconds) / (rows + chosen.tokens)
            chosen = self._most_saved(candidates, rows, faster, chosen)
        else:
            chosen = self._trial(candidates, rows)
        for i, count in chosen.counts.items():
            counts[i] = count
        return counts

    def learn(self, outcomes: Sequence[Verification], rows: int, seconds: float | None) -> None:
        """Learn from a step.

        Args:
            outcomes: the results of its proposals, empty for a plain step.
            rows: number of decode rows.
            seconds: duration of the step; None if it had other rows too.
        """
        for each in outcomes:
            where = each.candidate
            self.acceptance.observe(where.request_id, where.evidence, each.accepted, rejected=each.rejected)
        follows = self._consecutive > 0
        self._rests = self._consecutive >= _MAX_CONSECUTIVE and not outcomes
        self._consecutive = self._consecutive + 1 if outcomes else 0
        if seconds is None:
            return
        if not outcomes:
            self.costs.observe_plain(rows, seconds, follows=follows)
        plain = self.costs.plain(rows)
        if plain is None or self._account is None:
            return
        gain = -self.costs.transition(rows) if follows and not outcomes else 0.0
        if len({each.candidate.proposer for each in outcomes}) == 1:
            proposed = sum(each.proposed for each in outcomes)
            proposer = outcomes[0].candidate.proposer
            took = self.costs.observe(proposer, rows, len(outcomes), proposed, seconds)
            gain = sum(each.accepted for each in outcomes) * plain / rows - (took - plain)
        balance = self._account + gain + _LOSS_SHARE * plain
        self._account = max(-_MAX_DEBT * plain, min(_MAX_CREDIT * plain, balance))
        self._trial_budget += _TRIAL_SHARE * plain

    def charge(self, seconds: float) -> None:
        """Subtract time that proposers spent without a proposal from the gains."""
        if self._account is not None:
            self._account -= seconds

    def _could_pay(self, candidate: ProposalCandidate, rows: int, value: float) -> bool:
        """Whether a proposal could save time if all its tokens after the first were free (a cheap bound)."""
        rate = min(self.acceptance.rate(candidate.request_id, candidate.evidence), _MAX_RATE)
        most = value * rate / (1.0 - rate)
        return most > self._entry + self.costs.added(candidate.proposer, rows, 1, 1)

    def _most_saved(
        self, candidates: Sequence[ProposalCandidate], rows: int, value: float, default: _Choice | None = None
    ) -> _Choice:
        """Return the proposals that together save the most time, if a token is worth ``value`` seconds."""
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

    def _best(self, candidate: ProposalCandidate, rows: int, value: float) -> tuple[float, int, float]:
        """Return the seconds saved by the best length, that length, and its expected accepted tokens.

        The fixed cost of the row is not subtracted. The n-th token is accepted with probability rate^n, so it
        pays while rate^n * value exceeds the cost of verifying it. While that cost is a guess, one token
        measures it.
        """
        rate = min(self.acceptance.rate(candidate.request_id, candidate.evidence), _MAX_RATE)
        cost = self.costs.token(candidate.proposer, rows)
        share = min(1.0, cost / value)
        count = candidate.most if share <= 0.0 else int(math.log(share) / math.log(rate))
        most = candidate.most if self.costs.is_measured(candidate.proposer, rows) else 1
        count = max(1, min(count, most))
        expected = rate * (1.0 - rate**count) / (1.0 - rate)
        return value * expected - cost * count, count, expected

    def _trial(self, candidates: Sequence[ProposalCandidate], rows: int) -> _Choice:
        """Return a proposal of one token that is not expected to save time, if the trial budget allows it."""
        if self._trial_budget < self.costs.token(candidates[0].proposer, rows):
            return _NOTHING
        rates = [self.acceptance.rate(each.request_id, each.evidence) for each in candidates]
        i = max(range(len(candidates)), key=rates.__getitem__)
        cost = self._entry + self.costs.added(candidates[i].proposer, rows, 1, 1)
        if cost > self._trial_budget:
            return _NOTHING
        self._trial_budget = 0.0  # a saved-up budget must not pay for several trials in a row
        return _Choice({i: 1}, 0.0, cost)
