"""Proposals, right or wrong, change the number of steps of a request and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import GREEDY, FailWhen, alone, make_engine, make_request, make_runner, run
from speculation_kit import Oracle

from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.engine.speculation.controller import Controller, ProposalCandidate
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.types.sampling_params import SamplingParams

OPTIONS = (
    GREEDY,
    SamplingParams(max_tokens=15, seed=3, top_k=40, repetition_penalty=1.2),
    SamplingParams(max_tokens=17, seed=4, temperature=0.7, presence_penalty=0.5, logprobs=2),
    SamplingParams(max_tokens=11, temperature=0.0, no_repeat_ngram_size=2, min_tokens=4),
)


def mixed(count: int = 9) -> list[Request]:
    """Return requests of many lengths and options."""
    return [make_request(f"r{i}", 1 + 11 * i % 40, OPTIONS[i % len(OPTIONS)]) for i in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("lie_every", [0, 1, 2, 5])
@pytest.mark.parametrize("kv_tokens", [None, 60])
@pytest.mark.parametrize("max_step_tokens", [5, 32])
def test_all_options_in_batches_under_memory_pressure(
    lie_every: int, kv_tokens: int | None, max_step_tokens: int
) -> None:
    oracle = Oracle(lie_every)
    engine, runner = make_engine(proposer=oracle, kv_tokens=kv_tokens, max_step_tokens=max_step_tokens)
    requests = mixed()
    assert run(engine, requests) == [alone(request) for request in requests]
    stats = engine.stats()
    assert oracle.proposals > 5
    assert (stats.accepted_tokens > 5) == (lie_every != 1)
    assert stats.accepted_tokens == sum(request.metrics.accepted_tokens for request in requests)
    assert (runner.held_tokens(), stats.kv_tokens, oracle.num_known) == (0, 0, 0)


def test_right_proposals_save_steps() -> None:
    def steps(proposer: Oracle | None) -> int:
        engine, _ = make_engine(proposer=proposer)
        run(engine, [make_request("a", 6, SamplingParams(temperature=0.0, max_tokens=21))])
        return engine.stats().steps

    assert (steps(None), steps(Oracle()), steps(Oracle(lie_every=1))) == (21, 5, 21)


def test_rejected_proposals_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def decline(self: Controller, candidates: Sequence[ProposalCandidate], rows: int) -> list[int]:
        nonlocal looks
        looks += 1
        return [0] * len(candidates)

    monkeypatch.setattr(Controller, "choose", decline)
    engine, _ = make_engine(proposer=Oracle(), adaptive=True)
    run(engine, [make_request("a", 6, SamplingParams(temperature=0.0, max_tokens=45))])
    assert 8 < looks < 30


def test_log_probabilities_are_the_same() -> None:
    def logprobs(proposer: Oracle | None) -> object:
        request = make_request("a", 6, SamplingParams(temperature=0.0, max_tokens=9, logprobs=3))
        run(make_engine(proposer=proposer)[0], [request])
        return request.output_logprobs

    assert logprobs(Oracle(lie_every=3)) == logprobs(None)


def test_a_request_ends_within_a_proposal() -> None:
    tokens = alone(make_request("a", 6))
    request = make_request("a", 6, end_token_ids={tokens[6]})
    oracle = Oracle()
    oracle._known["a"] = tokens  # goes on beyond the end
    engine, _ = make_engine(proposer=oracle, prefix_cache=True)
    assert run(engine, [request]) == [tokens[:7]]
    assert request.stop_reason == tokens[6]
    assert run(engine, [make_request("b", [*request.prompt_token_ids, *tokens[:6]])])[0][0] == tokens[6]


def test_a_finished_request_s_prefix_serves_others() -> None:
    engine, _ = make_engine(proposer=Oracle(lie_every=4), prefix_cache=True)
    first = make_request("a", 6)
    run(engine, [first])
    known = [*first.prompt_token_ids, *first.output_token_ids]
    second = make_request("b", [*known, 7])
    assert run(engine, [second]) == [alone(second)]
    assert second.metrics.cached_tokens >= len(known) - 2


def test_a_failure_caused_by_a_proposal_fails_no_request() -> None:
    requests = [make_request(str(i), 4) for i in range(3)]
    expected = [alone(request) for request in requests]
    oracle = Oracle(lie_every=2)
    lies = {(tokens[i] + 1) % 256 for tokens in expected for i in range(2, len(tokens), 2)}
    known = {t for r, tokens in zip(requests, expected, strict=True) for t in (*r.prompt_token_ids, *tokens)}
    engine, runner = make_engine(proposer=oracle)
    runner.before_forward = fault = FailWhen(lies - known)
    assert run(engine, requests) == expected
    assert fault.hits


def test_a_seed_s_tokens_do_not_depend_on_the_proposals() -> None:
    params = SamplingParams(max_tokens=30, seed=11, temperature=1.3)
    expected = alone(make_request("a", 5, params))
    for lie_every in range(4):
        engine, _ = make_engine(proposer=Oracle(lie_every, max_tokens=1 + lie_every))
        assert run(engine, [make_request("a", 5, params)]) == [expected]


@pytest.mark.long
def test_sampled_tokens_keep_the_model_s_distribution() -> None:
    """Chi-square over 3,000 samples of a token that was always proposed, and of the token after it."""
    vocab_size, count = 6, 3000

    def runner() -> NullRunner:
        return NullRunner(RunnerConfig(max_slots=1, context_length=8), NullOptions(vocab_size=vocab_size))

    def request(i: int, prompt: list[int], length: int) -> Request:
        return make_request(str(i), prompt, SamplingParams(max_tokens=length, seed=i, temperature=3.0))

    class Stubborn(Oracle):
        def evidence(self, request: Request) -> int | None:
            self._known[request.request_id] = [0, 2, 1]
            return 0

    engine = Engine(runner(), EngineConfig(adaptive_speculation=False), Stubborn(max_tokens=2))
    drawn = np.array(run(engine, [request(i, [3], 3) for i in range(count)]))
    assert 0 < engine.stats().acceptance_rate < 1
    for prefix in ([], [0], [0, 2]):
        places = (drawn[:, : len(prefix)] == prefix).all(axis=1)
        logits = runner().forward([Row(0, np.array([3, *prefix]), 0)])[0][0].astype(np.float64) / 3.0
        expected = np.exp(logits - logits.max())
        expected *= places.sum() / expected.sum()
        observed = np.bincount(drawn[places, len(prefix)], minlength=vocab_size)
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert statistic < 20.5, prefix  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("vocab_size", [2, 3])
def test_prompt_lookup_finds_something_to_propose(vocab_size: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    requests = [make_request(f"r{i}", [i % 2, 1, 0, 1], params) for i in range(4)]

    def engine(proposer: PromptLookup | None) -> Engine:
        runner = NullRunner(RunnerConfig(max_slots=3), NullOptions(vocab_size=vocab_size))
        return Engine(runner, EngineConfig(adaptive_speculation=False, prefix_cache=False), proposer)

    expected = run(engine(None), [make_request(r.request_id, r.prompt_token_ids, params) for r in requests])
    speculative = engine(PromptLookup(5))
    assert run(speculative, requests) == expected
    assert speculative.stats().accepted_tokens > 20
    assert speculative.stats().steps < 120


def test_closing_the_engine_closes_the_proposer() -> None:
    oracle = Oracle()
    make_engine(proposer=oracle)[0].close()
    assert oracle.closed


@pytest.mark.parametrize("proposer", [None, Oracle()])
def test_logits_that_are_no_numbers_fail_the_request_where_they_are(
    proposer: Oracle | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make_engine(proposer=proposer)
    request = make_request("a", 6)
    expected = alone(request)[:3]
    known = np.array([*request.prompt_token_ids, *expected])
    broken = runner._extend(Row(0, known, 0))[-1]
    runner.release(0)
    compute = runner._logits
    spoil = {broken: np.float32(np.nan)}
    monkeypatch.setattr(runner, "_logits", lambda value: compute(value) * spoil.get(value, np.float32(1)))
    assert run(engine, [request]) == [expected]
    assert "not finite" in str(request.error)


def test_processors_of_batches_see_every_token_of_a_proposal() -> None:
    class NoRepeat:
        def wants(self, params: SamplingParams) -> bool:
            return True

        def apply(self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState]) -> None:
            for row, state in zip(logits, states, strict=True):
                row[state.output_token_ids] = -np.inf

    def tokens(proposer: Oracle | None) -> list[list[int]]:
        config = EngineConfig(adaptive_speculation=False, logits_processors=(NoRepeat(),))
        engine = Engine(make_runner(), config, proposer)
        params = SamplingParams(temperature=0.0, max_tokens=120)
        return run(engine, [make_request("a", 6, params)])

    assert tokens(Oracle()) == tokens(None)
