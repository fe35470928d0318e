"""Proposals are made where they save time, and cost almost nothing elsewhere; time is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from speculation_kit import Oracle

from carryall.runtime.engine.speculation.controller import Controller, ProposalCandidate, Verification
from carryall.runtime.engine.speculation.costs import StepCosts


class Simulation:
    """A simulation of requests that decode together, each with one proposal per step.

    Args:
        rates: the true chance that a request's next proposed token is accepted.
        batched: whether the simulated device verifies several rows at once.
        shared: fixed seconds of a run.
        token: seconds of each token in a run.
        noise: standard deviation of the logarithm of a step's time.
        transition: extra time of a plain step after a step with proposals, as a fraction.
        evidence: probability that there is a proposal.
        clock: yields for each step the factor by which other work on the machine slows it.
        seed: of the chances and the noise.
    """

    def __init__(
        self,
        rates: list[float],
        *,
        batched: bool = False,
        shared: float = 1.0,
        token: float = 0.2,
        noise: float = 0.0,
        transition: float = 0.0,
        evidence: float = 1.0,
        clock: Iterator[float] | None = None,
        seed: int = 0,
    ) -> None:
        self.rates = rates
        self.controller = Controller(batched=batched)
        self.seconds = 0.0
        self.tokens = 0
        self.proposed = 0
        self._batched, self._shared, self._token, self._noise = batched, shared, token, noise
        self._transition, self._evidence, self._clock = transition, evidence, clock
        self._switched = False
        self._rng = np.random.default_rng(seed)
        self._oracle = Oracle()

    def run(self, steps: int) -> float:
        """Return tokens per undisturbed second, relative to a run without proposals."""
        begin = self.seconds, self.tokens
        for _ in range(steps):
            self._step()
        plain = len(self.rates) / self._duration([0] * len(self.rates))
        return (self.tokens - begin[1]) / (self.seconds - begin[0]) / plain

    def _step(self) -> None:
        rows = len(self.rates)
        places = [i for i in range(rows) if self._rng.random() < self._evidence]
        candidates = [ProposalCandidate(i, str(i), self._oracle, 0, 16) for i in places]
        chosen = dict(zip(places, self.controller.choose(candidates, rows), strict=True))
        counts = [chosen.get(i, 0) for i in range(rows)]
        outcomes = []
        for i, (count, rate) in enumerate(zip(counts, self.rates, strict=True)):
            accepted = int(min(count, self._rng.geometric(1.0 - rate) - 1))
            self.tokens += 1 + accepted
            self.proposed += count
            if count:
                candidate = ProposalCandidate(i, str(i), self._oracle, 0, 16)
                outcomes.append(Verification(candidate, count, accepted, accepted < count))
        seconds = self._duration(counts) * float(np.exp(self._noise * self._rng.normal()))
        if self._switched and not outcomes:
            seconds *= 1.0 + self._transition
        self._switched = bool(outcomes)
        self.seconds += seconds
        self.controller.learn(outcomes, rows, seconds * (next(self._clock) if self._clock else 1.0))

    def _duration(self, counts: list[int]) -> float:
        if self._batched:
            return self._shared + self._token * (len(counts) + sum(counts))
        alone = [self._shared + self._token * (1 + count) for count in counts if count]
        together = len(counts) - len(alone)
        return sum(alone) + (self._shared + self._token * together if together else 0.0)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_rejected_proposals_cost_less_than_three_percent(batched: bool, rows: int, noise: float) -> None:
    simulation = Simulation([0.02] * rows, batched=batched)
    simulation.run(30)
    gain = simulation.run(1000)
    assert gain > 0.97
    assert simulation.proposed


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("token", [0.15, 0.4])
def test_a_first_short_text_loses_at_most_three_percent(rate: float, token: float) -> None:
    """Tokens that cost a part of a plain step, other work beside the first steps, good and bad luck."""
    losses = []
    for seed in range(30):
        clock = preempted(np.random.default_rng(seed))
        simulation = Simulation([rate], batched=True, shared=1.0 - token, token=token, clock=clock, seed=seed)
        simulation.run(40)
        losses.append(simulation.seconds - simulation.tokens)
    assert float(np.mean(losses)) < 0.03 * 40
    assert max(losses) < 3.0


@pytest.mark.parametrize(("rate", "token", "least"), [(0.5, 0.2, 1.15), (0.7, 0.4, 1.05)])
def test_an_acceptance_that_pays_is_not_given_up(rate: float, token: float, least: float) -> None:
    gains = [
        Simulation([rate], batched=True, shared=1.0 - token, token=token, seed=seed).run(1000)
        for seed in range(9)
    ]
    assert float(np.median(gains)) > least


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rate", [0.2, 0.35, 0.5])
@pytest.mark.parametrize("token", [0.05, 0.2])
def test_the_cost_of_proposals_for_later_steps_is_counted(rows: int, rate: float, token: float) -> None:
    """As on OpenVINO with prose: each step with proposals makes the next plain step slower."""
    simulation = Simulation(
        [rate] * rows, batched=True, token=token, noise=0.15, transition=0.5, evidence=0.35
    )
    simulation.run(100)
    assert simulation.run(2000) > 0.975


def jitter(rng: np.random.Generator) -> Iterator[float]:
    """Yield a random factor for every step."""
    while True:
        yield float(np.exp(0.4 * rng.normal()))


def preempted(rng: np.random.Generator) -> Iterator[float]:
    """Yield factors where one step in ten takes several times as long."""
    while True:
        yield float(rng.uniform(2, 8)) if rng.random() < 0.1 else 1.0


def company(rng: np.random.Generator, steps: int) -> Iterator[float]:
    """Yield factors of other work that starts and ends after about this many steps."""
    while True:
        yield from [float(rng.choice([1.0, 2.0, 4.0]))] * int(rng.geometric(1 / steps))


CLOCKS: dict[str, Callable[[np.random.Generator], Iterator[float]]] = {
    "jitter": jitter,
    "preempted": preempted,
    "short company": lambda rng: company(rng, 10),
    "long company": lambda rng: company(rng, 150),
}


@pytest.mark.long
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.45])
@pytest.mark.parametrize(("rows", "batched"), [(1, False), (8, False), (8, True)])
def test_a_noisy_clock_costs_at_most_three_percent(clock: str, rate: float, rows: int, batched: bool) -> None:
    """Proposals that almost or never save time, and noisy step times."""
    liar = CLOCKS[clock](np.random.default_rng(0))
    simulation = Simulation([rate] * rows, batched=batched, transition=0.3 * batched, clock=liar)
    assert simulation.run(800) > 0.97


def test_steps_with_proposals_tell_that_plain_ones_have_become_faster() -> None:
    """Plain steps measured while other work slowed them would make all proposals look cheap."""
    costs, oracle = StepCosts(batched=True), Oracle()
    for _ in range(12):
        costs.observe_plain(1, 2.0)
    for _ in range(12):
        costs.observe(oracle, 1, 1, 4, 1.2)
    assert costs.plain(1) == 1.2


@pytest.mark.parametrize(("token", "least"), [(0.05, 6.0), (0.2, 3.3), (0.5, 1.9)])
def test_accepted_proposals_reduce_the_steps(token: float, least: float) -> None:
    assert Simulation([0.97], token=token).run(400) > least


def test_each_request_gets_what_it_deserves() -> None:
    simulation = Simulation([0.95, 0.02, 0.95, 0.02], batched=True, token=0.05)
    simulation.run(40)
    counts = simulation.controller.choose(
        [ProposalCandidate(i, str(i), simulation._oracle, 0, 16) for i in range(4)], 4
    )
    assert min(counts[0], counts[2]) > 3
    assert counts[1] == counts[3] == 0


def test_large_batches_are_left_alone_where_rows_are_verified_one_by_one() -> None:
    assert Simulation([0.9], token=0.2).run(300) > 2.0
    many = Simulation([0.9] * 16, token=0.02)
    many.run(50)
    before = many.proposed
    assert many.run(300) > 0.97
    assert many.proposed - before < 300


def test_a_text_that_changes_is_noticed() -> None:
    simulation = Simulation([0.02])
    simulation.run(200)
    simulation.rates = [0.95]
    simulation.run(150)
    assert simulation.run(100) > 2.5
    simulation.rates = [0.02]
    assert simulation.run(200) > 0.93


def test_a_step_that_was_disturbed_does_not_count_for_much() -> None:
    simulation = Simulation([0.95])
    simulation.run(50)
    for _ in range(3):
        simulation.controller.learn([], 1, 100.0)
    assert simulation.run(50) > 2.5


def test_nothing_is_proposed_before_plain_steps_were_measured_and_then_one_token() -> None:
    controller, candidate = Controller(batched=True), ProposalCandidate(0, "a", Oracle(), 0, 8)
    for _ in range(3):
        assert controller.choose([candidate], 1) == [0]
        controller.learn([], 1, 1.0)
    assert controller.choose([candidate], 1) == [1]
    assert controller.choose([], 1) == []


def test_a_learned_rate_is_a_request_s_own_and_the_beginning_of_others() -> None:
    acceptance = Controller(batched=True).acceptance
    first = acceptance.rate("a", 1)
    for _ in range(30):
        acceptance.observe("a", 1, 0, rejected=True)
        acceptance.observe("b", 1, 4, rejected=False)
    assert acceptance.rate("a", 1) < 0.3 < acceptance.rate("c", 1) < acceptance.rate("b", 1)
    assert acceptance.rate("a", 2) == first
    acceptance.forget("a")
    assert acceptance.rate("a", 1) == acceptance.rate("c", 1)


def test_costs_are_learned_by_proposer() -> None:
    costs, rng = StepCosts(batched=True), np.random.default_rng(0)
    for rows in (1, 4):
        costs.observe_plain(rows, 1.0 + 0.1 * rows)
    assert not costs.is_measured("a", 1)
    for _ in range(60):
        rows, tokens = int(rng.choice([1, 4])), int(rng.integers(1, 9))
        costs.observe("a", rows, 1, tokens, 1.0 + 0.1 * rows + 0.05 + 0.08 * tokens)
    assert costs.token("a", 1) == pytest.approx(0.08, abs=0.03)
    assert costs.added("a", 4, 2, 6) == pytest.approx(0.58, abs=0.15)
    assert costs.token("b", 1) == pytest.approx(0.22)
    assert costs.is_measured("a", 1)
    assert not costs.is_measured("b", 1)
    assert costs.plain(2) is None
