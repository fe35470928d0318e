"""A grammar that is slow to tell what may come next holds up its own request only."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import GREEDY, EvenTokens, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_kit import Oracle

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import BestLogits
from carryall.runtime.engine.requests.request import Grammar, Request
from carryall.runtime.types.sampling_params import SamplingParams


class Late(EvenTokens):
    """Allows even tokens; each mask is there when it has been asked for often enough.

    Args:
        delays: how many times ``ready`` says no, for each mask in turn; the last holds for all others.
    """

    def __init__(self, *delays: int) -> None:
        self._delays, self._asked, self._place = delays or (0,), 0, 0

    def ready(self, seconds: float) -> bool:
        self._asked += 1
        return self._asked > self._delays[min(self._place, len(self._delays) - 1)]

    def observe(self, token: int) -> None:
        super().observe(token)
        self._asked, self._place = 0, self._place + 1

    def copy(self) -> Late:
        return Late(*self._delays)


def demanding(name: str, *delays: int, params: SamplingParams = GREEDY, prompt: int = 5) -> Request:
    future: Future[Grammar] = Future()
    future.set_result(Late(*delays))
    tokens = make_request(name, prompt).prompt_token_ids
    return Request(name, tokens, params, grammar=future)


def test_others_get_a_token_at_every_step() -> None:
    engine, _ = make_engine()
    slow, fast = demanding("slow", 3), make_request("fast")
    for request in (slow, fast):
        engine.add(request)
    for step in range(1, 13):
        before = len(slow.output_token_ids)
        told = engine.step()
        engine.check_integrity()
        assert len(fast.output_token_ids) == step
        assert (slow in told) == (len(slow.output_token_ids) > before)
    assert fast.finished
    assert 0 < len(slow.output_token_ids) < 6
    run(engine)
    assert slow.output_token_ids == run(make_engine()[0], [demanding("slow")])[0]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    delays=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=5),
    kv_tokens=st.sampled_from([None, 40, 64]),
    prefix_cache=st.booleans(),
    swap_tokens=st.sampled_from([0, 100]),
    temperature=st.sampled_from([0.0, 1.0]),
    lie_every=st.sampled_from([None, 0, 3]),
    top_logits=st.sampled_from([0, 16]),
)
def test_late_grammars_do_not_change_the_result(
    delays: list[list[int]],
    kv_tokens: int | None,
    prefix_cache: bool,
    swap_tokens: int,
    temperature: float,
    lie_every: int | None,
    top_logits: int,
) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=12)
    prompt = [demanding(str(i), params=params) for i in range(len(delays))]
    expected = [run(make_engine()[0], [one])[0] for one in prompt]
    late = [demanding(str(i), *each, params=params) for i, each in enumerate(delays)]
    oracle = None if lie_every is None else Oracle(lie_every)
    if oracle is not None:
        oracle._known = {one.request_id: tokens for one, tokens in zip(late, expected, strict=True)}
    engine, _ = make_engine(
        kv_tokens=kv_tokens,
        prefix_cache=prefix_cache,
        swap_tokens=swap_tokens,
        proposer=oracle,
        top_logits=top_logits,
    )
    plain = [make_request(f"plain {i}", params=params) for i in range(2)]
    found = run(engine, [*late, *plain])
    assert found[: len(late)] == expected
    assert [len(tokens) for tokens in found] == [12] * len(found)


def test_one_that_waits_can_be_cancelled_and_its_deadline_holds() -> None:
    engine, _ = make_engine()
    never = demanding("never", 10**9)
    engine.add(never)
    for _ in range(3):
        engine.step()
    assert engine.cancel("never") is never
    expiring = demanding("expiring", 10**9)
    expiring.deadline = time.monotonic() + 0.05
    engine.add(expiring)
    run(engine)
    assert expiring.finish_reason == "cancelled"


def test_a_failed_download_fails_the_request_that_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine(top_logits=16)
    best = runner._best

    def lost(logits: npt.NDArray[np.float32]) -> BestLogits:
        return dataclasses.replace(best(logits), whole=refuse)

    def refuse() -> npt.NDArray[np.float32]:
        raise ProviderRuntimeError("device lost")

    monkeypatch.setattr(runner, "_best", lost)
    slow, fast = demanding("slow", 3), make_request("fast")
    run(engine, [slow, fast])
    assert (slow.finish_reason, slow.error) == ("error", "device lost")
    assert fast.finish_reason == "length"
