"""NUMA nodes of a machine, simulated by a tree of files, and processes bound to them."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.providers import numa
from carryall.providers.base import RunnerConfig
from carryall.providers.numa import NumaNode, nodes_of_ranks, numa_nodes
from carryall.providers.runners.runner_process import RunnerProcess, opened_info

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NUMA nodes are read from Linux")


def machine(folder: Path, **cpus: str) -> Path:
    for name, text in cpus.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "cpulist").write_text(text + "\n")
    (folder / "possible").write_text("0-3\n")
    return folder


def test_nodes_have_the_processors_that_may_be_used(tmp_path: Path) -> None:
    folder = machine(tmp_path, node10="12-13", node0="0-3,8-11", node1="4-7", node2="")
    (folder / "node3").mkdir()  # it went offline
    everything = frozenset(range(16))
    assert numa_nodes(folder, everything) == [
        NumaNode(0, frozenset({0, 1, 2, 3, 8, 9, 10, 11})),
        NumaNode(1, frozenset({4, 5, 6, 7})),
        NumaNode(10, frozenset({12, 13})),
    ]
    assert numa_nodes(folder, frozenset({3, 12})) == [
        NumaNode(0, frozenset({3})),
        NumaNode(10, frozenset({12})),
    ]
    assert numa_nodes(tmp_path / "absent", everything) == []


def test_ranks_are_spread_equally_and_neighbours_stay_together() -> None:
    nodes = [NumaNode(0, frozenset({0})), NumaNode(1, frozenset({1}))]
    assert [node.number for node in nodes_of_ranks(nodes, 4)] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="3 ranks cannot be spread equally over 2 NUMA nodes"):
        nodes_of_ranks(nodes, 3)
    with pytest.raises(UsageError, match="one NUMA node; omit it"):
        nodes_of_ranks(nodes[:1], 2)


BINDS = """
import ctypes, os
from carryall.providers.numa import NumaNode, bind
bind(NumaNode(0, frozenset({CPU})))
mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
done = ctypes.CDLL(None).syscall(239, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, 0)
print(sorted(os.sched_getaffinity(0)), done, mode.value, mask[0])
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of get_mempolicy is that of x86")
def test_a_process_takes_its_memory_from_its_node() -> None:
    """The kernel says so, or refuses both calls."""
    cpu = min(os.sched_getaffinity(0))
    code = BINDS.replace("CPU", str(cpu))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if "is not bound" in done.stderr:
        assert done.stdout.startswith(f"[{cpu}] ")
    else:
        assert done.stdout == f"[{cpu}] 0 1 1\n"


def test_a_kernel_that_refuses_a_memory_policy_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(cpus))
    monkeypatch.setattr(platform, "machine", lambda: "z80")
    with caplog.at_level(logging.WARNING):
        numa.bind(NumaNode(1, frozenset({4, 5})))
    assert bound == [frozenset({4, 5})]
    assert caplog.messages == [
        "memory is not bound to NUMA node 1, only processors are: Function not implemented (ENOSYS)"
    ]


@pytest.mark.long
def test_a_rank_runs_on_the_processors_of_its_node() -> None:
    cpu = max(os.sched_getaffinity(0))
    process = RunnerProcess()
    try:
        opened = process.call(
            "null", Path("absent"), RunnerConfig(max_slots=2), NumaNode(0, frozenset({cpu}))
        )
        assert opened_info(opened, "rank 0").max_slots == 2
        assert psutil.Process(process.pid).cpu_affinity() == [cpu]
        with pytest.raises(ProviderRuntimeError, match=r"rank 1 runs carryall 0\.0\.1, and this process"):
            opened_info((opened[0], "carryall 0.0.1"), "rank 1")
    finally:
        process.close()


def test_processors_that_do_not_exist_are_named() -> None:
    process = RunnerProcess()
    try:
        with pytest.raises(ProviderRuntimeError, match="cannot be bound to NUMA node 7"):
            process.call("null", Path("absent"), RunnerConfig(), NumaNode(7, frozenset({1000})))
    finally:
        process.close()
