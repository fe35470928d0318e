"""Tenants share the slots by the tokens they were served, not by the number of their requests."""

from __future__ import annotations

from engine_kit import GREEDY, make_engine, make_request
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.schedule.waiting import VirtualCounters


def test_a_tenant_that_floods_the_queue_does_not_delay_another() -> None:
    engine, _ = make_engine(max_slots=2)
    flood = [make_request(f"flood {i}", 5, GREEDY, cache_salt="flood") for i in range(40)]
    for request in flood:
        engine.add(request)
    engine.step()
    single = [make_request(f"single {i}", 5, GREEDY, cache_salt="single") for i in range(3)]
    for request in single:
        engine.add(request)
    while not all(request.finished for request in single):
        engine.step()
        engine.check_integrity()
    assert sum(request.finished for request in flood) <= 6


def test_service_is_shared_equally_however_large_the_requests_are() -> None:
    engine, _ = make_engine(max_slots=2)
    requests: dict[str, list[Request]] = {"small": [], "large": []}
    for i in range(60):
        requests["small"].append(make_request(f"small {i}", 3, GREEDY, cache_salt="small"))
        requests["large"].append(make_request(f"large {i}", 90, GREEDY, cache_salt="large"))
    for request in [*requests["large"], *requests["small"]]:
        engine.add(request)
    for _ in range(200):
        engine.step()
    served = {
        name: sum(r.num_computed for r in each if r.slot is not None)
        + sum(r.num_tokens + 2 * len(r.output_token_ids) for r in each if r.finished)
        for name, each in requests.items()
    }
    assert not all(request.finished for request in requests["small"])
    assert 0.6 < served["small"] / served["large"] < 1.6


def test_an_idle_tenant_accumulates_no_credit() -> None:
    counters = VirtualCounters()
    counters.join("busy")
    counters.join("idle")
    counters.leave("idle")
    for _ in range(10):
        counters.chosen("busy")
        counters.charge("busy", 10.0)
    counters.join("idle")
    assert counters.served("idle") == 90.0
    counters.charge("idle", 500.0)
    counters.leave("idle")
    counters.join("idle")
    assert counters.served("idle") == 590.0


@given(st.lists(st.integers(0, 5000), max_size=50))
def test_tenants_that_left_are_forgotten(names: list[int]) -> None:
    counters = VirtualCounters()
    for round_ in range(40):
        for name in [*names, *range(round_ * 50, round_ * 50 + 50)]:
            counters.join(str(name))
            counters.chosen(str(name))
            counters.leave(str(name))
    assert len(counters._served) <= 1024 + 1
    assert not counters._active
