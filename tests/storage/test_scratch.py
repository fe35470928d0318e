"""Temporary folders of killed processes are deleted by the next process; those in use stay."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest
from faults import Fault, faulty

from carryall.storage import scratch
from carryall.storage.scratch import folder_beside, scratch_folder, sweep

HOLDER = """
import sys, tempfile
from pathlib import Path
from carryall.storage.scratch import folder_beside, scratch_folder

tempfile.tempdir = sys.argv[1]
with scratch_folder() as first, folder_beside(Path(sys.argv[1], "out"), Path(sys.argv[1])) as second:
    (first / "weights").write_bytes(bytes(1000))
    (second / "sub").mkdir()
    (second / "sub" / "weights").write_bytes(bytes(1000))
    print(first, second, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@contextmanager
def holder(place: Path) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """A process that holds two folders until its stdin ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, [Path(name) for name in process.stdout.readline().split()]
        finally:
            process.kill()


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_folders_of_a_killed_process_are_deleted_and_those_of_a_living_one_stay(place: Path) -> None:
    with holder(place) as (process, folders):
        assert [folder.is_dir() for folder in folders] == [True, True]
        assert sweep(place) == 0
        with scratch_folder():
            assert [(folder / "weights").exists() for folder in folders] == [True, False]
            assert (folders[1] / "sub/weights").stat().st_size == 1000
        process.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        process.wait(10)
        assert [folder.is_dir() for folder in folders] == [True, True]
        with scratch_folder() as own:
            assert left(place) == [own.name, own.name + ".lock"]
    assert left(place) == []


def test_a_process_that_ends_normally_leaves_nothing(place: Path) -> None:
    with holder(place) as (process, folders):
        process.communicate("", timeout=10)
        assert process.returncode == 0
        assert (len(folders), left(place)) == (2, [])


KILLER = """
import os, signal, sys, tempfile
from pathlib import Path
from carryall.storage import scratch

place = Path(sys.argv[1])
tempfile.tempdir = str(place)

def work(last):
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename != scratch.__file__:
            return None
        seen += event == "line"
        if seen > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    with scratch.scratch_folder() as folder, scratch.folder_beside(place / "out", place) as other:
        (folder / "a").write_text("a")
        (other / "a").write_text("a")

for line in range(1000):
    child = os.fork()
    if not child:
        work(line)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    scratch.sweep(place)
    assert not list(place.iterdir()), line
    if os.waitstatus_to_exitcode(status) == 0:
        break
print(line)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_a_kill_at_any_line_leaves_nothing_after_the_next_sweep(place: Path) -> None:
    """The process dies before line N of the module, for all N, while it makes, fills and deletes folders."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 30 < int(done.stdout) < 999


def test_a_folder_of_another_thread_stays(place: Path) -> None:
    made, done = threading.Event(), threading.Event()
    found: list[bool] = []

    def work() -> None:
        with scratch_folder() as folder:
            made.set()
            done.wait(10)
            found.append(folder.is_dir())

    thread = threading.Thread(target=work)
    thread.start()
    assert made.wait(10)
    assert sweep(place) == 0
    done.set()
    thread.join(10)
    assert (found, left(place)) == ([True], [])


def dead(place: Path, name: str = "carryall.01234567", size: int = 10) -> Path:
    """What a killed process leaves."""
    (place / name).mkdir()
    (place / name / "weights").write_bytes(bytes(size))
    (place / f"{name}.lock").touch()
    return place / name


def test_sweeping_returns_the_bytes(place: Path) -> None:
    dead(place, size=3000)
    dead(place, ".carryall.89abcdef", size=500)
    assert sweep(place) == 3500
    assert left(place) == []
    assert sweep(place / "missing") == 0


def test_only_folders_of_these_names_are_deleted(place: Path) -> None:
    names = "carryall carryall-models carryall.1 my.01234567 carryall.0123456z carryall.012345678"
    for name in names.split():
        dead(place, name)
    (place / "carryall.aaaaaaaa").mkdir()  # no lock: of nobody
    before = left(place)
    assert sweep(place) == 0
    assert left(place) == before


@pytest.mark.skipif(os.name == "nt", reason="links and owners of POSIX")
@pytest.mark.parametrize("kind", ["the folder is a link", "the lock is a link", "the lock is a pipe"])
def test_links_and_pipes_are_not_followed(kind: str, place: Path, tmp_path: Path) -> None:
    treasure = dead(tmp_path, "treasure")
    name = place / "carryall.01234567"
    lock = place / "carryall.01234567.lock"
    if kind == "the folder is a link":
        name.symlink_to(treasure)
        lock.touch()
    elif kind == "the lock is a link":
        dead(place)
        lock.unlink()
        lock.symlink_to(treasure / "weights")
    else:
        dead(place)
        lock.unlink()
        os.mkfifo(lock)
    sweep(place)
    assert (treasure / "weights").stat().st_size == 10
    assert len(left(place)) == 2


@pytest.mark.skipif(os.name == "nt", reason="owners of POSIX")
def test_folders_of_another_user_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead(place)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert sweep(place) == 0
    assert len(left(place)) == 2
    monkeypatch.undo()
    assert sweep(place) == 10


def test_on_a_file_system_without_locks_folders_of_a_week_are_deleted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    young, old = dead(place), dead(place, "carryall.fedcba98")
    week = time.time() - 8 * 24 * 3600
    os.utime(old.with_name(old.name + ".lock"), (week, week))
    with scratch_folder() as folder:
        assert folder.is_dir()
    assert left(place) == [young.name, young.name + ".lock"]


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_other_users_cannot_read_a_temporary_folder(place: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.with_name(folder.name + ".lock").stat().st_mode & 0o077 == 0


def test_a_folder_beside_an_output_has_a_short_name_of_its_own(tmp_path: Path) -> None:
    """A name of 255 characters is the longest of most file systems."""
    out = tmp_path / ("x" * 255)
    with folder_beside(out, out) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        folder.rename(out)
    assert out.is_dir()
    assert left(tmp_path) == ["tmp", out.name]


@pytest.mark.parametrize("call", ["create", "mkdir"])
def test_a_full_disk_names_the_output(call: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        faulty(Fault(tmp_path.resolve(), call, errno.ENOSPC)),
        pytest.raises(OSError, match=re.escape(f"{os.strerror(errno.ENOSPC)}: '{out}'")),
        folder_beside(out, out),
    ):
        pass
    assert left(tmp_path) == ["tmp"]


FULL = r"^\[Errno {}\] {} \(TMPDIR chooses the folder of temporary files\): '{}'$"


@pytest.mark.parametrize("call", ["create", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_temporary_folder_is_named_with_its_variable(call: str, number: int, place: Path) -> None:
    expected = FULL.format(number, re.escape(os.strerror(number)), re.escape(str(place)))
    with (
        faulty(Fault(place.resolve(), call, number)),
        pytest.raises(OSError, match=expected),
        scratch_folder() as folder,
    ):
        (folder / "weights").write_bytes(b"x")
    assert left(place) == []


def test_a_file_that_does_not_fit_names_the_temporary_folder(place: Path) -> None:
    expected = FULL.format(errno.ENOSPC, os.strerror(errno.ENOSPC), re.escape(str(place)))
    with pytest.raises(OSError, match=expected), scratch_folder(), scratch_folder() as inner:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(inner / "a/weights"))
    with pytest.raises(OSError, match=r": '/out/weights'$"), scratch_folder():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/weights")


def test_without_a_temporary_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    with pytest.raises(FileNotFoundError, match=r"No usable .* \(TMPDIR chooses"), scratch_folder():
        pass


def test_temporary_folders_are_made_in_one_place() -> None:
    """``tempfile`` alone leaves its folders behind when the process is killed."""
    root = Path(scratch.__file__).resolve().parents[1]
    folders = ("cli", "client", "exporter", "graph_opt", "providers", "runtime", "storage")
    users = {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) tempfile", path.read_text(encoding="utf-8"), re.M)
    }
    # The compiler runs before carryall's dependencies are installed.
    assert users == {"storage/scratch.py", "providers/native/compiler.py"}
