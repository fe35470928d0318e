"""Ctrl-C during a deferred block, and outside of one."""

from __future__ import annotations

import signal
import threading

import pytest

from carryall.runtime.process.stop_signals import uninterrupted


def test_the_block_ends_first() -> None:
    done = []

    @uninterrupted()
    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_ctrl_c_nothing_changes() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_get_no_signals() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
