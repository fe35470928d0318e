"""The waiting queue."""

from __future__ import annotations

from engine_kit import make_request
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.schedule.waiting import VirtualCounters, WaitingQueue


def requests(priorities: list[int]) -> list[Request]:
    made = [make_request(str(i), [1], priority=priority) for i, priority in enumerate(priorities)]
    for i, request in enumerate(made):
        request.arrival_index = i
    return made


@given(st.lists(st.integers(-2, 2), max_size=40), st.data())
def test_order_is_priority_then_arrival_whatever_is_removed(
    priorities: list[int], data: st.DataObject
) -> None:
    made = requests(priorities)
    queue = WaitingQueue()
    for request in data.draw(st.permutations(made)):
        queue.push(request)
    gone = data.draw(st.sets(st.sampled_from(made))) if made else set()
    for request in gone:
        queue.remove(request)
    served = []
    while queue:
        ahead = queue.first(data.draw(st.integers(1, 4)))
        assert all(request in queue for request in ahead)
        assert len(set(ahead)) == len(ahead)
        head = ahead[0]
        served.append(head)
        queue.remove(head)
    left = [request for request in made if request not in gone]
    assert served == sorted(left, key=lambda r: (r.priority, r.arrival_index))
    assert queue.first(1) == []


def test_removed_requests_are_not_kept_alive() -> None:
    queue = WaitingQueue()
    made = requests([0] * 1000)
    for request in made:
        queue.push(request)
    for request in made[1:]:
        queue.remove(request)
    assert len(queue) == 1
    assert len(queue._levels[0].lines[None].heap) < 25


def test_a_request_pushed_again_returns_to_its_place() -> None:
    first, second = requests([0, 0])
    queue = WaitingQueue()
    queue.push(second)
    queue.push(first)
    queue.remove(first)
    assert queue.first(3) == [second]
    queue.push(first)
    assert queue.first(3) == [first, second]


def test_the_least_served_tenant_is_next() -> None:
    counters = VirtualCounters()
    queue = WaitingQueue(counters)
    made = [make_request(str(i), [1], cache_salt="ab"[i >= 4]) for i in range(6)]
    for i, request in enumerate(made):
        request.arrival_index = i
        counters.join(request.tenant)
        queue.push(request)
    order = []
    while queue:
        head = queue.first(1)[0]
        order.append(head.request_id)
        queue.remove(head)
        counters.chosen(head.tenant)
        counters.charge(head.tenant, 10.0 if head.tenant == "a" else 15.0)
    assert order == ["0", "4", "1", "5", "2", "3"]


def test_resumed_requests_come_before_all_tenants_of_their_priority() -> None:
    queue = WaitingQueue()
    made = requests([0, 0, -1])
    made[1].resumes = True
    for request in made:
        queue.push(request)
    assert queue.first(3) == [made[2]]
    queue.remove(made[2])
    assert queue.first(3) == [made[1]]


def test_lines_that_come_and_go_leave_nothing_behind() -> None:
    counters = VirtualCounters()
    queue = WaitingQueue(counters)
    for i in range(500):
        request = make_request(str(i), [1], cache_salt=str(i % 7))
        request.arrival_index = i
        counters.join(request.tenant)
        queue.push(request)
        assert queue.first(1) == [request]
        queue.remove(request)
        counters.charge(request.tenant, 1.0)
        counters.leave(request.tenant)
    assert not queue._levels
    assert len(queue._priorities) <= 1


def test_a_request_that_comes_back_is_there_once() -> None:
    queue = WaitingQueue()
    request, other = make_request("a"), make_request("b")
    request.resumes = other.resumes = True
    other.arrival_index = 1
    for each in (request, other):
        queue.push(each)
    queue.remove(request)
    queue.push(request)
    assert queue.first(8) == [request, other]
