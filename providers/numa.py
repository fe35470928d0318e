"""NUMA nodes of this machine, and binding a process to one: its threads, and the memory that it will take."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from pathlib import Path

from ..errors import UsageError
from ..records import dataclass

_log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
# Numbers of set_mempolicy(2); glibc has no function for it, and libnuma is often not installed.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "riscv64": 237}
_PREFERRED = 1  # other nodes are taken when this one is full
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A node with processors.

    Args:
        number: of the kernel.
        cpus: its processors that this process may use.
    """

    number: int
    cpus: frozenset[int]


def numa_nodes(folder: Path = _NODES, allowed: frozenset[int] | None = None) -> list[NumaNode]:
    """Return the nodes whose processors this process may use; one or none where there is nothing to choose.

    Args:
        folder: the kernel's list of nodes.
        allowed: processors; None takes the affinity of this process.
    """
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    found = []
    for path in folder.glob("node[0-9]*"):
        try:
            cpus = _cpus((path / "cpulist").read_text())
        except OSError:
            continue  # it was taken offline
        if cpus & allowed:
            found.append(NumaNode(int(path.name.removeprefix("node")), cpus & allowed))
    return sorted(found, key=lambda node: node.number)


def nodes_of_ranks(nodes: list[NumaNode], count: int) -> list[NumaNode]:
    """Return the node of each rank: equally many on each, neighbours together.

    Raises:
        UsageError: there are fewer than two nodes, or no whole number of ranks fits on each.
    """
    if len(nodes) < 2:
        raise UsageError("numa is auto, but this machine has one NUMA node; omit it")
    if count % len(nodes):
        raise UsageError(
            f"numa is auto, and {count} ranks cannot be spread equally over {len(nodes)} NUMA nodes; choose "
            f"tensor_parallel {len(nodes)} or a multiple"
        )
    return [nodes[rank * len(nodes) // count] for rank in range(count)]


def bind(node: NumaNode) -> None:
    """Bind this process to a node, before it has threads: they inherit both.

    Where the kernel refuses a memory policy (containers often do), memory still comes from the node whose
    processor writes it first; that is logged.

    Raises:
        OSError: the processors do not exist any longer, or are not allowed.
    """
    os.sched_setaffinity(0, node.cpus)
    error = _prefer_memory(node.number)
    if error:
        reason = f"{os.strerror(error)} ({errno.errorcode.get(error, error)})"
        _log.warning("memory is not bound to NUMA node %d, only processors are: %s", node.number, reason)


def _prefer_memory(number: int) -> int:
    """Take memory from a node while it has some; return the error number, 0 for none."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return errno.ENOSYS
    words = number // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[number // _BITS] = 1 << number % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel counts one bit less than it is given.
    done = libc.syscall(call, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(words * _BITS + 1))
    return 0 if done == 0 else ctypes.get_errno()


def _cpus(text: str) -> frozenset[int]:
    """Return the processors of a list of the kernel: ``0-3,8``."""
    cpus = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
