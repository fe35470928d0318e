"""A lock of a file has one holder in all processes and threads, and ends with its process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from carryall.storage.locks import WITHOUT_LOCKS, FileLock, lock_of

HOLDER = """
import sys
from pathlib import Path
from carryall.storage.locks import lock_of
lock = lock_of(Path(sys.argv[1]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.lock"


def taken(file: Path, seconds: float = 0.0) -> FileLock:
    lock = lock_of(file, seconds)
    assert lock is not None
    return lock


def test_one_holder_at_a_time_in_a_process(file: Path) -> None:
    first = taken(file)
    assert lock_of(file) is None
    first.release()
    first.release()  # a second time does nothing
    second = taken(file)
    assert lock_of(file) is None
    second.release()
    assert file.stat().st_size == 0


def test_a_killed_process_holds_no_lock(file: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert lock_of(file) is None
        process.kill()
        process.wait(10)
        taken(file).release()


def test_waiting_ends_when_the_holder_releases(file: Path) -> None:
    first = taken(file)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    taken(file, 60).release()
    timer.join()


def test_waiting_ends_after_the_seconds(file: Path) -> None:
    first, start = taken(file), time.monotonic()
    assert lock_of(file, 0.2) is None
    assert time.monotonic() - start >= 0.2
    first.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_holds_nothing() -> None:
    """It may outlive its parent, which is killed here."""
    code = """
import os, signal, sys, tempfile
from pathlib import Path
from carryall.storage.locks import lock_of
file = Path(tempfile.mkdtemp(), "lock")
parent = os.fork()
if not parent:
    lock = lock_of(file)
    child = os.fork()
    if child:
        os.kill(os.getpid(), signal.SIGKILL)
    lock.release()  # that of its parent: nothing
    os.read(0, 1)
    os._exit(0)
os.waitpid(parent, 0)
print(lock_of(file) is not None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input="", capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.skipif(os.name == "nt", reason="modes and links of POSIX")
def test_the_file_is_the_users_own_and_no_link(file: Path) -> None:
    taken(file).release()
    assert file.stat().st_mode & 0o077 == 0
    link = file.with_name("link.lock")
    link.symlink_to(file)
    with pytest.raises(OSError, match=r"link\.lock"):
        lock_of(link)


@pytest.mark.skipif(os.name == "nt", reason="flock")
@pytest.mark.parametrize("number", WITHOUT_LOCKS)
def test_a_file_system_without_locks_is_an_error(
    number: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(OSError, match=r"file\.lock") as caught:
        lock_of(file)
    assert caught.value.errno == number
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere") as caught:
        lock_of(tmp_path / "nowhere" / "lock")
    assert caught.value.errno == errno.ENOENT
