"""Which signals stop a process."""

from __future__ import annotations

import signal

from carryall.runtime.process.stop_signals import ending_at_interrupt, stop_signals


def test_an_ignored_signal_is_left_out() -> None:
    assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert stop_signals() == [signal.SIGTERM]


def test_an_interrupt_ends_the_process_unless_it_is_ignored() -> None:
    with ending_at_interrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_interrupt():
        signal.raise_signal(signal.SIGINT)
