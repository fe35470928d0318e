"""Which signals stop a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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


REPLACED = """
import ctypes, os, signal, sys, threading, time
from carryall.runtime.process.stop_signals import sigterm_kept

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))

def load():
    with sigterm_kept():
        # A library in C, in a thread: SIG_IGN is 1.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))

thread = threading.Thread(target=load)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sigaction")
def test_a_library_in_another_thread_cannot_take_sigterm_away() -> None:
    assert subprocess.run([sys.executable, "-c", REPLACED], check=False, timeout=60).returncode == 7
