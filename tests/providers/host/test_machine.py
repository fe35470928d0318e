"""Reading the machine: cores within affinity and quota, features, memory speed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carryall.providers.host import machine


@pytest.fixture
def fake_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads, numbered as Linux does: 0-3, then their siblings 4-7."""
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("allowed", "cores"), [(range(8), 4), ([0, 4], 1), ([0, 1, 4], 2), ([2], 1), ([0, 1, 2, 3], 4)]
)
def test_two_threads_of_a_core_count_once(
    fake_system: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[int], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_the_control_groups_quota_limits(
    fake_system: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        path = fake_system / "cgroup" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert machine.usable_cores() == cores


def test_this_machine_can_be_described() -> None:
    found = machine.describe_machine()
    assert 1 <= found.usable_cores <= found.logical_cores
    assert found.cpu
    assert found.memory_total is None or found.memory_total > 2**28


def test_a_system_without_proc_reveals_less(fake_system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: None)
    found = machine.describe_machine()
    assert found.features == ()
    assert found.memory_available is None


def test_memory_bandwidth_is_plausible() -> None:
    assert 0.1 < machine.memory_bandwidth(megabytes=16, seconds=0.02) < 10_000
