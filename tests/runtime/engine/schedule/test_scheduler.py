"""The plans of steps, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_kit import make_request

from carryall.runtime.engine.kv.slots import SlotTable
from carryall.runtime.engine.requests.prompt_images import PromptImages
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.schedule.scheduler import Scheduler, StepPlan
from carryall.runtime.types.sampling_params import SamplingParams


def make(num_slots: int = 4, max_step_tokens: int = 16, max_tokens: int | None = None) -> Scheduler:
    return Scheduler(SlotTable(num_slots, max_tokens), max_step_tokens)


def step(scheduler: Scheduler) -> StepPlan:
    """Plan a step without running it; append a token to each request whose prefill is complete."""
    plan = scheduler.plan()
    scheduler.commit(plan)
    for row, request in zip(plan.rows, plan.requests, strict=True):
        if row.num_logits:
            request.append(Sample(1))
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    """Return for each row: request, start, number of tokens, whether logits are needed."""
    return [
        (request.request_id, row.start, len(row.tokens), row.num_logits)
        for row, request in zip(plan.rows, plan.requests, strict=True)
    ]


def add(scheduler: Scheduler, *sizes: tuple[str, int]) -> list[Request]:
    requests = [make_request(name, size) for name, size in sizes]
    for request in requests:
        scheduler.add(request)
    return requests


def test_decode_rows_come_first_then_prompts_within_the_budget() -> None:
    scheduler = make()
    add(scheduler, ("a", 3))
    assert shape(step(scheduler)) == [("a", 0, 3, 1)]
    add(scheduler, ("b", 30), ("c", 4))
    assert shape(step(scheduler)) == [("a", 3, 1, 1), ("b", 0, 15, 0)]
    assert shape(step(scheduler)) == [("a", 4, 1, 1), ("b", 15, 15, 1)]
    assert shape(step(scheduler)) == [("a", 5, 1, 1), ("b", 30, 1, 1), ("c", 0, 4, 1)]


@pytest.mark.parametrize("first", [0, 3, 7, 14, 15])
@pytest.mark.parametrize("size", [1, 5, 30])
def test_a_picture_whose_tokens_see_each_other_is_in_one_step(first: int, size: int) -> None:
    """It moves to the next step, or its step exceeds the budget."""
    tokens = [1] * first + [9] * size + [2] * 20
    images = PromptImages.of(tokens, [9], [(b"key", np.zeros((size, 4), np.float32))])
    request = Request("a", tokens, SamplingParams(max_tokens=64), images=images)
    scheduler = Scheduler(SlotTable(4, None), 16, whole_pictures=True)
    scheduler.add(request)
    rows = [row for _ in range(6) for row in step(scheduler).rows]
    ends = [row.start + len(row.tokens) for row in rows]
    assert not any(first < end < first + size for end in ends)
    assert max(len(row.tokens) for row in rows) <= max(16, size)
    seen = np.concatenate([row.image_ahead for row in rows if row.image_ahead is not None])
    start = next(row.start for row in rows if row.image_ahead is not None)
    np.testing.assert_array_equal(seen[first - start :][:size], np.arange(size)[::-1])
    assert sorted(ends)[-1] > len(tokens)


def test_several_short_prompts_start_together() -> None:
    scheduler = make()
    add(scheduler, ("a", 5), ("b", 6), ("c", 9))
    assert shape(step(scheduler)) == [("a", 0, 5, 1), ("b", 0, 6, 1), ("c", 0, 5, 0)]


def test_row_tokens_are_the_request_s() -> None:
    scheduler = make(max_step_tokens=4)
    request = make_request("a", [9, 8, 7, 6, 5, 4])
    scheduler.add(request)
    assert step(scheduler).rows[0].tokens.tolist() == [9, 8, 7, 6]
    assert step(scheduler).rows[0].tokens.tolist() == [5, 4]
    assert step(scheduler).rows[0].tokens.tolist() == [1]


def test_waiting_requests_cost_nothing_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_slots=2, max_step_tokens=8)
    add(scheduler, *((str(i), 3) for i in range(5000)))
    step(scheduler)
    looked_at = set()
    plain = Request.__getattribute__

    def noted(request: Request, name: str) -> Any:
        looked_at.add(plain(request, "request_id"))
        return plain(request, name)

    monkeypatch.setattr(Request, "__getattribute__", noted)
    for _ in range(5):
        step(scheduler)
    assert looked_at == {"0", "1"}
    assert scheduler.num_waiting == 4998


def test_removed_requests_free_their_slot_at_once() -> None:
    scheduler = make(num_slots=1)
    a, b, c = add(scheduler, ("a", 3), ("b", 3), ("c", 3))
    step(scheduler)
    scheduler.remove(b)
    scheduler.remove(a)
    assert shape(step(scheduler)) == [("c", 0, 3, 1)]
    scheduler.remove(c)
    assert step(scheduler).rows == ()


def test_lower_priority_number_is_admitted_first() -> None:
    scheduler = make(num_slots=1)
    for name, priority in (("late", 5), ("first", -1), ("second", 0)):
        scheduler.add(make_request(name, 3, priority=priority))
    assert step(scheduler).requests[0].request_id == "first"


def test_an_urgent_prompt_does_not_wait_for_the_rest_of_a_long_one() -> None:
    scheduler = make()
    add(scheduler, ("long", 60))
    step(scheduler)
    urgent = make_request("urgent", 20, priority=-1)
    scheduler.add(urgent)
    add(scheduler, ("next", 5))
    assert shape(step(scheduler)) == [("urgent", 0, 16, 0)]
    assert shape(step(scheduler)) == [("urgent", 16, 4, 1), ("long", 16, 12, 0)]
    assert shape(step(scheduler))[1:] == [("long", 28, 15, 0)]


def test_a_tenant_s_long_prompt_gives_way_to_another_tenant_s() -> None:
    scheduler = make()
    for name, size in (("a", 60), ("b", 30)):
        scheduler.add(make_request(name, size, cache_salt=name))
    rows = [shape(step(scheduler)) for _ in range(4)]
    assert rows == [
        [("a", 0, 16, 0)],
        [("b", 0, 16, 0)],
        [("a", 16, 16, 0)],
        [("b", 16, 14, 1), ("a", 32, 2, 0)],
    ]


def test_the_youngest_is_preempted_when_the_budget_is_spent_and_resumes_later() -> None:
    scheduler = make(max_tokens=14)
    old, young = add(scheduler, ("old", 6), ("young", 5))
    step(scheduler)
    step(scheduler)
    assert scheduler.preemptions == 0  # 7 + 6 tokens
    plan = step(scheduler)
    assert [r.request_id for r in plan.requests] == ["old"]
    assert (scheduler.preemptions, young.slot, young.num_computed) == (1, None, 0)
    scheduler.remove(old)
    assert shape(step(scheduler)) == [("young", 0, 7, 1)]


def test_a_request_that_would_be_preempted_at_once_is_not_admitted() -> None:
    scheduler = make(max_tokens=14)
    add(scheduler, ("old", 6))
    step(scheduler)
    add(scheduler, ("young", 6))  # 7 and 6 tokens fit, but not one more of each
    assert [r.request_id for r in step(scheduler).requests] == ["old"]
    assert (scheduler.num_waiting, scheduler.preemptions) == (1, 0)


def test_a_preempted_request_is_admitted_before_later_ones() -> None:
    scheduler = make(max_tokens=14)
    old, young = add(scheduler, ("old", 6), ("young", 5))
    for _ in range(3):
        step(scheduler)
    add(scheduler, ("later", 1))
    scheduler.remove(old)
    assert [r.request_id for r in step(scheduler).requests] == ["young", "later"]
    assert young.output_token_ids == [1, 1, 1]


def test_no_request_overtakes_a_preempted_one() -> None:
    scheduler = make(max_tokens=14)
    add(scheduler, ("old", 6), ("young", 5))
    step(scheduler)
    step(scheduler)
    add(scheduler, ("later", 1))
    assert [r.request_id for r in step(scheduler).requests] == ["old"]


def test_a_request_that_fills_the_whole_budget_runs_alone() -> None:
    scheduler = make(max_tokens=8)
    big, small = add(scheduler, ("big", 8), ("small", 1))
    assert [r.request_id for r in step(scheduler).requests] == ["big"]
    scheduler.remove(big)
    assert [r.request_id for r in step(scheduler).requests] == ["small"]
    assert small.slot == 0


def test_waiting_requests_fill_gaps_without_a_copy() -> None:
    scheduler = make(num_slots=3)
    _, b, _, _ = add(scheduler, ("a", 2), ("b", 2), ("c", 2), ("d", 2))
    step(scheduler)
    scheduler.remove(b)
    assert scheduler.plan().rows[-1].slot == 1


def test_integrity_check_sees_a_slot_without_its_request() -> None:
    scheduler = make()
    (request,) = add(scheduler, ("a", 2))
    step(scheduler)
    request.slot = 3
    with pytest.raises((RuntimeError, KeyError)):
        scheduler.check_integrity()
    request.slot = 0
    scheduler._running.clear()
    with pytest.raises(RuntimeError, match="1 slots are in use"):
        scheduler.check_integrity()
