"""FairLock serves waiting threads in order."""

from __future__ import annotations

import threading

import pytest

from carryall.errors import UsageError
from carryall.runtime.process.fair_lock import FairLock

TIMEOUT = 60


def is_free(lock: FairLock) -> bool:
    def enter() -> None:
        with lock:
            pass

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return not thread.is_alive()


def wait_for_waiters(lock: FairLock, count: int) -> None:
    for _ in range(20_000):
        if len(lock._turns) == count:
            return
        threading.Event().wait(0.002)
    raise AssertionError(f"{len(lock._turns)} wait, not {count}")


def test_first_come_first_served_even_against_a_loop() -> None:
    lock, order = FairLock(), []

    def work(name: int) -> None:
        for _ in range(3):
            with lock:
                order.append(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    with lock:
        for count, thread in enumerate(threads, start=1):
            thread.start()
            wait_for_waiters(lock, count)
    for thread in threads:
        thread.join(TIMEOUT)
    assert order[:3] == [0, 1, 2]
    assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_only_one_holds_it() -> None:
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(500):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert most == 1
    assert is_free(lock)


def test_an_interrupted_waiter_passes_its_turn_on() -> None:
    lock = FairLock()

    class Turn:
        def acquire(self) -> None:
            raise KeyboardInterrupt

    waiting = Turn()
    with lock:
        lock._turns.append(waiting)  # type: ignore[arg-type]
        lock._give_up(waiting)  # type: ignore[arg-type]
    with lock:
        assert lock.is_ours
    lock._held = True  # as if the turn had been handed over just before the interrupt
    lock._give_up(waiting)  # type: ignore[arg-type]
    assert is_free(lock)


def test_errors_inside_release_it() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="x"), lock:
        raise ValueError("x")
    assert is_free(lock)


def test_a_thread_that_would_wait_for_itself_is_told() -> None:
    lock = FairLock()
    with lock, pytest.raises(UsageError, match="would wait for itself"), lock:
        pass
    assert is_free(lock)
