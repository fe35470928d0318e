"""Text beyond the context: what follows is what the model says to the first and the recent tokens."""

from __future__ import annotations

import pytest
from engine_kit import alone, make_engine, make_request, run
from speculation_kit import Oracle

from carryall.errors import UsageError
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

CONTEXT, SINKS = 40, 4
RECENT = (CONTEXT - SINKS) // 2
LONG = SamplingParams(temperature=0.0, max_tokens=150)


def endless(**options: object) -> Engine:
    _, runner = make_engine(context_length=CONTEXT)
    config = EngineConfig(context_shift=True, attention_sinks=SINKS, **options)  # type: ignore[arg-type]
    return Engine(runner, config)


def expected(request: Request) -> list[int]:
    """The same, a new request each time that the context is full."""
    tokens, output = list(request.prompt_token_ids), list[int]()
    while len(output) < 150:
        params = SamplingParams(temperature=0.0, max_tokens=min(CONTEXT - len(tokens), 150 - len(output)))
        new = alone(make_request("part", tokens, params))
        output += new
        tokens += new
        tokens = tokens[:SINKS] + tokens[-RECENT:]
    return output


@pytest.mark.parametrize("sinks", [CONTEXT - 1, 1000])
def test_sinks_that_leave_nothing_to_drop_are_refused(sinks: int) -> None:
    _, runner = make_engine(context_length=CONTEXT)
    with pytest.raises(
        UsageError, match=f"attention_sinks is {sinks}, but a context of 40 tokens allows at most 38"
    ):
        Engine(runner, EngineConfig(context_shift=True, attention_sinks=sinks))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sliding_equals_new_requests_with_sinks_and_recent_tokens(prefix_cache: bool) -> None:
    engine = endless(prefix_cache=prefix_cache)
    requests = [make_request(name, size, LONG) for name, size in (("a", 3), ("b", 20), ("c", 39))]
    assert run(engine, requests) == [expected(request) for request in requests]
    assert all(request.finish_reason == "length" for request in requests)


def test_proposals_end_where_the_context_does() -> None:
    _, runner = make_engine(context_length=CONTEXT)
    config = EngineConfig(context_shift=True, attention_sinks=SINKS, adaptive_speculation=False)
    engine = Engine(runner, config, Oracle(lie_every=4))
    request = make_request("a", 10, LONG)
    assert run(engine, [request]) == [expected(request)]


def test_a_request_without_limit_goes_on_until_it_is_cancelled() -> None:
    engine = endless()
    request = make_request("a", 5, SamplingParams(temperature=0.0, max_tokens=None))
    engine.add(request)
    for _ in range(500):
        engine.step()
        engine.check_integrity()
    assert len(request.output_token_ids) > 400
    engine.cancel("a")
    assert request.finish_reason == "cancelled"
    assert engine.stats().kv_tokens <= CONTEXT


def test_slid_requests_survive_preemption() -> None:
    _, runner = make_engine(context_length=CONTEXT)
    engine = Engine(
        runner, EngineConfig(context_shift=True, attention_sinks=SINKS, kv_bytes=70, swap_bytes=10**6)
    )
    requests = [make_request(name, 20, LONG) for name in "abc"]
    assert run(engine, requests) == [expected(request) for request in requests]
    assert engine.stats().preemptions > 0
