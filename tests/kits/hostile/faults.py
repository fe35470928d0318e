"""Faults of the operating system in this process: calls on files of one folder fail with an errno.

The calls of Python are replaced, so nothing but the chosen folder is affected and no privileges are needed.
Libraries written in C make their own calls: ``tests/cli/test_faults_of_calls.py`` has real faults for these.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "create", "read", "write", "sync", "rename", "mkdir")
NUMBERS = {
    "open": (errno.EIO, errno.EMFILE),
    "create": (errno.ENOSPC, errno.EIO),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "sync": (errno.ENOSPC, errno.EIO),
    "rename": (errno.ENOSPC, errno.EIO),
    "mkdir": (errno.ENOSPC, errno.EIO),
}


@dataclass
class Fault:
    """``count`` calls of one kind on files below ``folder`` fail, after ``skip`` of them that succeed.

    Args:
        folder: an absolute path.
        call: one of ``CALLS``; "create" opens a file for writing.
        number: the errno.
        skip: number of calls that succeed first.
        count: number of calls that fail then; later ones succeed again.

    Attributes:
        seen: number of calls of this kind so far; the fault occurred if it exceeds ``skip``.
    """

    folder: Path
    call: str
    number: int
    skip: int = 0
    count: int = 1 << 30
    seen: int = 0

    def meet(self, call: str, path: Path | None, *names: Any) -> None:
        """Fail if this call on this file is to fail; the error has the given file names."""
        if call != self.call or path is None or not path.is_relative_to(self.folder):
            return
        self.seen += 1
        if self.skip < self.seen <= self.skip + self.count:
            given = [name if isinstance(name, int) else os.fspath(name) for name in names]
            named = given if len(given) < 2 else (given[0], None, given[1])
            raise OSError(self.number, os.strerror(self.number), *named)


@contextmanager
def faulty(fault: Fault) -> Iterator[Fault]:
    """Let a fault occur in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", _opening(fault, io.open))
        patch.setattr(builtins, "open", io.open)
        for module, name, call, place in (
            (os, "open", "open", 0),
            (os, "fsync", "sync", 0),
            (os, "fdatasync", "sync", 0),
            (os, "mkdir", "mkdir", 0),
            (os, "rename", "rename", 1),
            (os, "replace", "rename", 1),
            (os, "link", "rename", 1),
            (os, "write", "write", 0),
            (os, "pwrite", "write", 0),
            (os, "sendfile", "write", 0),
            (os, "copy_file_range", "write", 1),
            (mmap, "mmap", "read", 0),
        ):
            if hasattr(module, name):
                patch.setattr(module, name, _failing(fault, getattr(module, name), call, place))
        yield fault


def _failing(fault: Fault, original: Callable[..., Any], call: str, place: int) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        path = _path(args[place])
        if path is not None and not (call == "open" and path.is_dir()):  # folders are opened to clean up
            writes = call == "open" and args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            names = args[: {"open": 1, "mkdir": 1, "rename": 2}.get(call, 0)]
            fault.meet("create" if writes else call, path, *names)
        return original(*args, **options)

    return run


def _opening(fault: Fault, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        path = _path(file)
        if path is None or not path.is_relative_to(fault.folder):
            return original(file, mode, buffering, *args, **options)
        writes = set(mode) & set("wax+")
        fault.meet("create" if writes else "open", path, file)
        raw = _File(file, mode.replace("b", "").replace("t", ""), opener=options.pop("opener", None))
        raw.fault, raw.path = fault, path
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader
        buffered = kind(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    return run


class _File(io.FileIO):
    fault: Fault
    path: Path

    def readinto(self, buffer: Any, /) -> int:
        self.fault.meet("read", self.path)
        return super().readinto(buffer)

    def read(self, size: int | None = -1, /) -> bytes:
        self.fault.meet("read", self.path)
        return super().read(-1 if size is None else size)

    def readall(self) -> bytes:
        self.fault.meet("read", self.path)
        return super().readall()

    def write(self, data: Any, /) -> int:
        self.fault.meet("write", self.path)
        return super().write(data)

    def fileno(self) -> int:
        if self.fault.call == "write" and self.writable():
            raise io.UnsupportedOperation("nothing is written past ``write``")
        return super().fileno()


def _path(file: Any) -> Path | None:
    """The absolute path of a name or of an open file; None if it has none."""
    if isinstance(file, int):
        try:
            return Path(os.readlink(f"/proc/self/fd/{file}"))
        except OSError:
            return None
    try:
        return Path(os.path.abspath(os.fsdecode(file)))
    except TypeError:
        return None


class Killed(BaseException):
    """What a killed thread gets; no code expects it."""


@contextmanager
def killed_in(thread: str, owner: Any, name: str) -> Iterator[None]:
    """Kill the first thread whose name begins with ``thread`` when it calls ``owner.name`` in the block."""
    original, lock = getattr(owner, name), threading.Lock()
    killed: list[threading.Thread] = []

    def run(*args: Any, **options: Any) -> Any:
        with lock:
            due = not killed and threading.current_thread().name.startswith(thread)
            if due:
                killed.append(threading.current_thread())
        if due:
            raise Killed
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, run)
        yield
    assert killed, f"no thread {thread} calls {name}"
