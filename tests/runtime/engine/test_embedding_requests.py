"""Embedding requests are batched, preempted, cancelled and served from the prefix cache like others."""

from __future__ import annotations

import pytest
from engine_kit import FailWhen, alone, make_engine, make_request, run, vector

from carryall.errors import UsageError
from carryall.providers.base import RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.pooled_states import Pooling
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

LAST_AND_MEAN: tuple[Pooling, Pooling] = ("last", "mean")


def text(name: str, pooling: Pooling, size: int = 50) -> Request:
    return Request(
        name, make_request(name, size).prompt_token_ids, SamplingParams(max_tokens=1), pooling=pooling
    )


def assert_right(request: Request) -> None:
    assert request.pooling is not None
    assert (request.finish_reason, request.output_token_ids) == ("stop", [])
    expected = vector(request.prompt_token_ids, request.pooling)
    assert request.embedding == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kv_tokens", [None, 70])
def test_in_pieces_beside_streams_and_under_memory_pressure(kv_tokens: int | None) -> None:
    engine, runner = make_engine(max_step_tokens=16, kv_tokens=kv_tokens)
    texts = [text(f"{pooling}{i}", pooling, 10 + 9 * i) for i in range(4) for pooling in LAST_AND_MEAN]
    streams = [make_request(f"s{i}", 15) for i in range(3)]
    run(engine, [*texts, *streams])
    for request in texts:
        assert_right(request)
    assert [request.output_token_ids for request in streams] == [alone(request) for request in streams]
    stats = engine.stats()
    assert (stats.finished, runner.held_tokens()) == (len(texts) + len(streams), 0)


def test_a_preempted_text_is_pooled_once() -> None:
    """A growing stream, which arrived first, preempts the text in the middle of its prefill."""
    engine, _ = make_engine(max_slots=2, max_step_tokens=4, kv_tokens=64)
    stream = make_request("s", 4, SamplingParams(temperature=0.0, max_tokens=40))
    mean = text("m", "mean", 50)
    run(engine, [stream, mean])
    assert engine.stats().preemptions
    assert_right(mean)
    assert stream.output_token_ids == alone(stream)


def test_the_prefix_cache_serves_texts_and_is_fed_by_them() -> None:
    engine, _ = make_engine(prefix_cache=True)
    first, last, mean = text("a", "last"), text("a", "last"), text("a", "mean")
    last.request_id, mean.request_id = "b", "c"
    for request in (first, last, mean):
        run(engine, [request])
        assert_right(request)
    assert [r.metrics.cached_tokens for r in (first, last, mean)] == [0, 49, 0]
    follows = make_request("d", [*first.prompt_token_ids, 1])
    assert run(engine, [follows]) == [alone(follows)]
    assert follows.metrics.cached_tokens == 50


def test_a_text_may_be_cancelled_or_fail() -> None:
    engine, runner = make_engine(max_step_tokens=16)
    gone, poisoned, other = text("a", "mean"), text("b", "mean"), text("c", "last")
    poisoned.prompt_token_ids[40] = 255
    poisoned.token_slice(40, 41)[:] = 255
    runner.before_forward = FailWhen({255} - set(other.prompt_token_ids))
    for request in (gone, poisoned, other):
        engine.add(request)
    engine.step()
    engine.cancel("a")
    run(engine)
    assert (gone.finish_reason, poisoned.finish_reason) == ("cancelled", "error")
    assert gone.embedding is None
    assert_right(other)
    assert runner.held_tokens() == 0


def test_a_model_without_hidden_states_refuses() -> None:
    engine = Engine(NullRunner(RunnerConfig(max_slots=1), NullOptions()))
    with pytest.raises(UsageError, match="without hidden states"):
        engine.add(text("a", "last"))
    assert not engine.has_work
