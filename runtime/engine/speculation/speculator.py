"""Speculation in a step: add proposals to its rows before it, and learn from the result after it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ....records import dataclass
from ..requests.request import Request
from ..schedule.scheduler import Scheduler, StepPlan
from .controller import Controller, ProposalCandidate, Verification
from .proposer import Proposer, StateReader, Tokens

# Searching for proposals costs time, so steps are skipped while the controller declines all proposals: one
# more step for every _PATIENCE steps with declined proposals, at most _MAX_PAUSE.
_PATIENCE = 8
_MAX_PAUSE = 4
# Hidden states cost time too: while all proposals are declined, so many of each cycle of tokens have none.
_CYCLE, _UNREAD = 64, 40


@dataclass(slots=True)
class SpeculationCounters:
    """Running totals; see ``EngineStats``."""

    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Speculator:
    """Add proposals to decode rows where that is expected to save time.

    Args:
        proposers: asked in this order; the first with evidence proposes for a request.
        batched: whether the runner runs rows of several tokens together with all other rows.
        max_step_tokens: maximum tokens of a step.
        adaptive: False makes every proposal at its full length.
    """

    def __init__(
        self, proposers: Sequence[Proposer], *, batched: bool, max_step_tokens: int, adaptive: bool = True
    ) -> None:
        self.counters = SpeculationCounters()
        self._proposers = tuple(proposers)
        self.readers = [each for each in self._proposers if isinstance(each, StateReader)]
        self._controller = Controller(batched=batched)
        self._max_step_tokens = max_step_tokens
        self._adaptive = adaptive
        self._decoding = 0  # decode rows of the step
        self._chosen = 0  # proposals that the controller chose
        self._made: dict[str, ProposalCandidate] = {}  # candidates of the step's proposals, by request id
        self._declined = 0  # steps with declined proposals since a token was accepted
        self._pause = 0  # steps to skip

    def with_proposals(self, plan: StepPlan, scheduler: Scheduler) -> StepPlan:
        """Return the plan with proposals in its decode rows, within the token and KV budgets."""
        if self._made:
            self._made.clear()
        decoding = plan.decode_rows()
        self._decoding, self._chosen = len(decoding), 0
        if self._pause:
            self._pause -= 1
            return plan
        candidates = [c for i in decoding if (c := self._candidate(i, plan.requests[i])) is not None]
        if not candidates:
            return plan
        if self._adaptive:
            counts = self._controller.choose(candidates, len(decoding))
        else:
            counts = [candidate.most for candidate in candidates]
        if not any(counts):
            self._declined += 1
            self._pause = min(self._declined // _PATIENCE, _MAX_PAUSE)
            return plan
        self._chosen = sum(count > 0 for count in counts)
        budget = self._max_step_tokens - sum(len(row.tokens) for row in plan.rows)
        begin = time.perf_counter()
        proposals = self._propose(plan, candidates, counts)
        if not all(len(tokens) for _, tokens in proposals):
            self._controller.charge(time.perf_counter() - begin)
        added: dict[int, Tokens] = {}
        for candidate, tokens in proposals:
            request = plan.requests[candidate.index]
            tokens = tokens[: request.valid_prefix(tokens[:budget])]
            if len(tokens) and scheduler.reserve(request, len(tokens)):
                budget -= len(tokens)
                added[candidate.index] = tokens
                self._made[candidate.request_id] = candidate
        return plan.with_proposals(added)

    def wants_states(self, request: Request, stop: int) -> bool:
        """Whether a proposer reads the hidden states of a row that ends at ``stop``.

        While proposals pause, some of the tokens are enough to try one now and then.
        """
        if self._declined >= _PATIENCE and stop % _CYCLE < _UNREAD:
            return False
        return any(reader.wants_states(request, stop) for reader in self.readers)

    def observe(self, plan: StepPlan, accepted: Sequence[int]) -> None:
        """Pass the hidden states of known and accepted tokens to the proposers that read them."""
        for row, request, proposed, right in zip(
            plan.rows, plan.requests, plan.proposed, accepted, strict=True
        ):
            states = row.last_hidden_states
            if states is None or request.finished or request.pooling is not None:
                continue
            for reader in self.readers:
                reader.observe(request, row.start, states[: len(states) - proposed + right])

    def learn(self, plan: StepPlan, accepted: Sequence[int], seconds: float) -> None:
        """Learn from the step: ``accepted`` tokens per row, and its duration."""
        outcomes = self._outcomes(plan, accepted) if self._made else []
        if any(outcome.accepted for outcome in outcomes):
            self._declined = 0
        undisturbed = len(outcomes) == self._chosen and self._decoding == len(plan.rows)
        if self._adaptive and self._decoding:
            self._controller.learn(outcomes, self._decoding, seconds if undisturbed else None)

    def forget(self, request: Request) -> None:
        """Drop the state of an ended request."""
        self._controller.acceptance.forget(request.request_id)
        for proposer in self._proposers:
            proposer.forget(request)

    def close(self) -> None:
        """Close the proposers."""
        for proposer in self._proposers:
            proposer.close()

    def _outcomes(self, plan: StepPlan, accepted: Sequence[int]) -> list[Verification]:
        outcomes = []
        for request, proposed, right in zip(plan.requests, plan.proposed, accepted, strict=True):
            if not proposed:
                continue
            rejected = right < proposed and not request.finished
            outcomes.append(Verification(self._made[request.request_id], proposed, right, rejected))
            for counters in (self.counters, request.metrics):
                counters.proposed_tokens += proposed
                counters.accepted_tokens += right
        return outcomes

    def _candidate(self, index: int, request: Request) -> ProposalCandidate | None:
        room = request.remaining_tokens - 1  # every step samples one token anyway
        if room < 1:
            return None
        for proposer in self._proposers:
            evidence = proposer.evidence(request)
            if evidence is not None:
                most = min(room, proposer.max_tokens)
                return ProposalCandidate(index, request.request_id, proposer, (proposer, evidence), most)
        return None

    def _propose(
        self, plan: StepPlan, candidates: Sequence[ProposalCandidate], counts: Sequence[int]
    ) -> list[tuple[ProposalCandidate, Tokens]]:
        wanted: dict[Proposer, list[tuple[ProposalCandidate, int]]] = {}
        for candidate, count in zip(candidates, counts, strict=True):
            if count:
                wanted.setdefault(candidate.proposer, []).append((candidate, count))
        proposals: list[tuple[ProposalCandidate, Tokens]] = []
        for proposer, chosen in wanted.items():
            tokens = proposer.propose([(plan.requests[c.index], count) for c, count in chosen])
            proposals += zip((candidate for candidate, _ in chosen), tokens, strict=True)
        return proposals
