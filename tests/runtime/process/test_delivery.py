"""How states travel from the engine's thread to an event loop: at once, or together after a rest."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from carryall.runtime.process.delivery import Delivery


class Clockwork:
    """An event loop whose time passes only when the test says so, or when a callback takes some."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wakes = 0  # calls from another thread
        self.closed = False
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...], asyncio.Handle]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def is_closed(self) -> bool:
        return self.closed

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> asyncio.Handle:
        return self.call_later(0.0, callback, *arguments)

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> asyncio.Handle:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.wakes += 1
        return self.call_soon(callback, *arguments)

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, cast(Any, self))
        heapq.heappush(self._calls, (self.now + seconds, next(self._order), callback, arguments, handle))
        return handle

    def get_debug(self) -> bool:
        return False

    def run_until(self, time: float) -> None:
        """Run what is due until then."""
        while self._calls and self._calls[0][0] <= time:
            at, _, callback, arguments, handle = heapq.heappop(self._calls)
            self.now = max(self.now, at)
            if not handle.cancelled():
                callback(*arguments)
        self.now = max(self.now, time)


class Reader:
    """A stream whose reader needs ``seconds`` for the newest state; keeps what it got, and when."""

    def __init__(self, loop: Clockwork, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self.state = ""
        self.got: list[tuple[float, str]] = []

    def tell(self) -> None:
        self.got.append((self._loop.now, self.state))
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._loop.now += self._seconds


def made(seconds: float, readers: int = 1) -> tuple[Clockwork, Delivery[Reader], list[Reader]]:
    loop = Clockwork()
    return loop, Delivery(cast(Any, loop), Reader.tell), [Reader(loop, seconds) for _ in range(readers)]


def post(delivery: Delivery[Reader], readers: list[Reader], state: str, *, urgent: bool = False) -> None:
    for reader in readers:
        reader.state = state
    delivery.post(() if urgent else readers, readers if urgent else ())


def test_each_state_comes_at_once_if_reading_is_quick() -> None:
    loop, delivery, readers = made(seconds=0.0001)
    for step in range(1, 6):
        loop.run_until(0.02 * step)
        post(delivery, readers, str(step))
        loop.run_until(0.02 * step + 0.001)
    assert [state for _, state in readers[0].got] == list("12345")
    assert [time for time, _ in readers[0].got] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert loop.wakes == 5


def test_one_wake_up_serves_all_readers() -> None:
    loop, delivery, readers = made(seconds=0.0001, readers=8)
    post(delivery, readers, "a")
    loop.run_until(0.01)
    assert loop.wakes == 1
    assert all([state for _, state in reader.got] == ["a"] for reader in readers)


def test_reading_takes_a_twentieth_of_the_time() -> None:
    """8 readers of 0.1 ms each, and a step each 1 ms: newer states replace older ones until the rest ends."""
    loop, delivery, readers = made(seconds=0.0001, readers=8)
    for step in range(1000):
        loop.run_until(0.001 * step)
        post(delivery, readers, str(step))
    loop.run_until(2.0)
    reads = sum(len(reader.got) for reader in readers)
    assert 0.04 < 0.0001 * reads / 1.0 < 0.055
    assert all(reader.got[-1][1] == "999" for reader in readers)


def test_no_state_waits_longer_than_25_milliseconds() -> None:
    loop, delivery, readers = made(seconds=0.01)
    post(delivery, readers, "a")
    loop.run_until(0.011)
    post(delivery, readers, "b")
    loop.run_until(1.0)
    assert [state for _, state in readers[0].got] == ["a", "b"]
    assert readers[0].got[1][0] == pytest.approx(0.035)


def test_urgent_states_do_not_wait_for_the_end_of_the_rest() -> None:
    """First tokens and ends are sent at once; the tokens of other streams do not cost more for it."""
    loop, delivery, readers = made(seconds=0.001, readers=2)
    post(delivery, readers, "a")
    loop.run_until(0.003)
    post(delivery, readers[:1], "b")
    loop.run_until(0.004)
    assert [len(reader.got) for reader in readers] == [1, 1]
    post(delivery, readers[1:], "end", urgent=True)
    loop.run_until(0.005)
    assert [[state for _, state in reader.got] for reader in readers] == [["a"], ["a", "end"]]
    loop.run_until(1.0)
    post(delivery, readers, "c")
    loop.run_until(1.001)
    assert [state for _, state in readers[0].got] == ["a", "b", "c"]
    # Reading took 2 ms; then 25 ms of rest.
    assert [time for time, _ in readers[0].got] == pytest.approx([0.0, 0.027, 1.0])


def test_urgent_states_come_before_the_others() -> None:
    """A first token does not wait for the readers of all running requests."""
    loop, delivery, readers = made(seconds=0.001, readers=4)
    order: list[int] = []
    delivery._tell = lambda reader: order.append(readers.index(reader))
    delivery.post(readers[:3], urgent=readers[3:])
    loop.run_until(0.001)
    assert order == [3, 0, 1, 2]


def test_a_newer_state_replaces_an_urgent_one() -> None:
    loop, delivery, readers = made(seconds=0.001)
    post(delivery, readers, "first", urgent=True)
    post(delivery, readers, "second")
    loop.run_until(1.0)
    assert [state for _, state in readers[0].got] == ["second"]
    post(delivery, readers, "third")
    post(delivery, readers, "end", urgent=True)
    loop.run_until(2.0)
    assert [state for _, state in readers[0].got] == ["second", "end"]


def test_a_closed_loop_is_an_error() -> None:
    loop, delivery, readers = made(seconds=0.001)
    post(delivery, readers, "a")
    loop.closed = True
    with pytest.raises(RuntimeError, match="closed"):
        post(delivery, readers, "b")
