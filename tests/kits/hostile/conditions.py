"""Conditions in which the system gives little to a process: closed pipes, no permission, low limits."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

_DROP_FROM_BOUNDING_SET, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2
_CAPABILITY_VERSION = 0x20080522


def without_override() -> None:
    """Let this process, and a program that it executes, respect the modes of files, even as root."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; twice 32 bits
    failed = libc.capget(header, sets)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        failed |= libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
        for number in range(3):
            sets[number] &= ~(1 << capability)
    if failed or libc.capset(header, sets):
        os._exit(99)


def limit(kind: str, amount: int) -> Callable[[], None]:
    """A function that lowers a limit of its process."""
    return functools.partial(resource.setrlimit, getattr(resource, kind), (amount, amount))


def nothing() -> None:
    """Leave the process as it is."""


@dataclass(frozen=True)
class Condition:
    """What holds for a process.

    Args:
        apply: called in the process before the program.
        modes: modes of files and folders of the sandbox, by name.
        stdout: "" for a pipe that is read, "closed" for one that nobody reads, "none" for no descriptor.
        fresh: whether the interpreter must start in this condition.
    """

    apply: Callable[[], None] = nothing
    modes: dict[str, int] = field(default_factory=dict)
    stdout: str = ""
    fresh: bool = False

    def prepare(self, cpu_seconds: int) -> None:
        """Apply it to this process, which may use the processor for a limited time."""
        if self.stdout == "none":
            os.close(1)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        self.apply()


CONDITIONS = {
    "a pipe that nobody reads": Condition(stdout="closed"),
    "no stdout": Condition(stdout="none"),
    "a full stdout": Condition(stdout="/dev/full"),
    "unreadable weights": Condition(without_override, {"package/model.onnx.data": 0}),
    "unreadable files": Condition(
        without_override,
        {
            "package/carryall.json": 0,
            "checkpoint/config.json": 0,
            "lines.jsonl": 0,
            "text.txt": 0,
            "done.jsonl": 0,
        },
    ),
    "unreadable folders": Condition(without_override, {"package": 0, "checkpoint": 0, "done.jsonl.job": 0}),
    "a read-only output folder": Condition(without_override, {"out": 0o555}),
    "a read-only cache": Condition(without_override, {"cache": 0o555}),
    "files of 10 kB": Condition(limit("RLIMIT_FSIZE", 10_000)),
    "files of 0 bytes": Condition(limit("RLIMIT_FSIZE", 0)),
    "1 GB of addresses": Condition(limit("RLIMIT_AS", 1 << 30), fresh=True),
    "300 MB of addresses": Condition(limit("RLIMIT_AS", 300 << 20), fresh=True),
    "12 open files": Condition(limit("RLIMIT_NOFILE", 12), fresh=True),
    "20 open files": Condition(limit("RLIMIT_NOFILE", 20), fresh=True),
    "1 process": Condition(limit("RLIMIT_NPROC", 1), fresh=True),
}
