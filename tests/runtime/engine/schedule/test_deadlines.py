"""A request whose deadline passed ends in every state, and frees all its resources."""

from __future__ import annotations

import time

import pytest
from engine_kit import GREEDY, alone, make_engine, make_request, run

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.schedule.deadlines import Deadlines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def due(name: str, deadline: float | None) -> Request:
    request = make_request(name)
    request.deadline = deadline
    return request


def test_requests_surface_when_their_time_has_come() -> None:
    deadlines = Deadlines()
    late, early, never = due("late", 9.0), due("early", 5.0), due("never", None)
    for request in (late, early, never):
        deadlines.add(request)
    assert deadlines.take(4.9) == []
    assert deadlines.take(5.0) == [early]
    assert deadlines.take(100.0) == [late]


def test_finished_requests_are_not_kept() -> None:
    deadlines = Deadlines()
    for i in range(100):
        request = due(str(i), float(i))
        deadlines.add(request)
        request.finish("stop")
    assert len(deadlines._heap) < 70


def test_finished_requests_behind_one_that_lasts_are_not_kept_either() -> None:
    deadlines = Deadlines()
    lasting = due("lasting", 0.0)
    deadlines.add(lasting)
    for i in range(1, 1000):
        request = due(str(i), float(i))
        deadlines.add(request)
        request.finish("stop")
    assert len(deadlines._heap) < 100
    assert deadlines.take(0.0) == [lasting]


def test_running_and_waiting_requests_end_at_their_deadline(clock: Clock) -> None:
    engine, runner = make_engine(max_slots=2)
    requests = [due("runs", 200.0), due("runs on", None), due("waits", 150.0), due("waits on", None)]
    for request in requests:
        engine.add(request)
    engine.step()
    clock.now = 160.0
    assert requests[2] in engine.step()
    clock.now = 200.0
    assert requests[0] in engine.step()
    for request, count in ((requests[0], 2), (requests[2], 0)):
        assert (request.finish_reason, request.stop_reason) == ("cancelled", "deadline")
        assert len(request.output_token_ids) == count
        assert request.slot is None
    run(engine)
    assert requests[1].output_token_ids == alone(requests[1])
    assert requests[3].output_token_ids == alone(requests[3])
    assert engine.stats().cancelled == 2
    assert runner.held_tokens() == 0


def test_a_request_that_ends_in_time_is_left_alone(clock: Clock) -> None:
    engine, _ = make_engine()
    request = due("a", 101.0)
    run(engine, [request])
    clock.now = 102.0
    assert run(engine, [make_request("b", 5, GREEDY)])
    assert request.finish_reason == "length"
