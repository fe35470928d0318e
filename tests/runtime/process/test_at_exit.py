"""A command frees nothing when it ends, and does everything else that an interpreter does then."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
class Freed:
    def __del__(self):
        print("freed", flush=True)
kept = Freed()
atexit.register(print, "registered first")
def late():
    time.sleep(0.2)
    print("thread")
from carryall.cli import main
atexit.register(print, "registered second")
sys.argv = ["carryall", *sys.argv[1:]]
try:
    main()
finally:
    threading.Thread(target=late).start()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--no-such-option", 2)])
def test_threads_are_joined_and_functions_called_but_nothing_is_freed(argument: str, code: int) -> None:
    done = run("-c", PROGRAM, argument)
    assert done.returncode == code
    assert done.stdout.splitlines()[-3:] == ["thread", "registered second", "registered first"]


def test_another_end_of_the_interpreter_frees_them() -> None:
    """So that the test above can fail."""
    done = run("-c", PROGRAM.replace("main()", "sys.exit(0)"))
    assert (done.returncode, done.stdout.split()[-1]) == (0, "freed")


def test_a_profiler_sees_the_end() -> None:
    done = run("-m", "cProfile", "-m", "carryall", "--version")
    assert done.returncode == 0
    assert "function calls" in done.stdout
