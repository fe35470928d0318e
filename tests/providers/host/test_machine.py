"""Reading the machine: cores within affinity and quota, features, memory speed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
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


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_the_control_groups_limit_memory(fake_system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_machine_memory", lambda: (16 * 2**30, 8 * 2**30))
    monkeypatch.setattr(machine, "_groups", lambda: [fake_system / "cgroup/a/b", fake_system / "cgroup/a"])
    assert machine.memory() == (16 * 2**30, 8 * 2**30)
    # The inner group is unlimited; pages of files count as available.
    write_group(fake_system / "cgroup/a/b", max="max", current="5")
    stat = f"anon 1\ninactive_file {2**28}\n"
    write_group(fake_system / "cgroup/a", max=str(2**31), current=str(2**30), stat=stat)
    assert machine.memory() == (2**31, 2**30 + 2**28)
    write_group(fake_system / "cgroup/a", current=str(2**32))
    assert machine.memory() == (2**31, 0)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has it")
def test_the_memory_of_the_machine_is_what_psutil_says() -> None:
    total, available = machine._machine_memory()
    facts = psutil.virtual_memory()
    assert total == facts.total
    assert abs(available - facts.available) < 0.2 * total


def test_version_1_of_control_groups(fake_system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_groups", list)
    folder = fake_system / "cgroup/memory"
    write_group(folder, limit_in_bytes=str(2**28), usage_in_bytes=str(2**27), stat="total_inactive_file 9\n")
    assert machine.memory() == (2**28, 2**27 + 9)


def test_groups_are_those_of_this_process(fake_system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_system / "cgroup"
    monkeypatch.setattr(machine, "_read", lambda path: "1:cpu:/old\n0::/a/b")
    assert machine._groups() == [root / "a/b", root / "a", root]


def test_this_machine_can_be_described() -> None:
    found = machine.describe_machine()
    assert 1 <= found.usable_cores <= found.logical_cores
    assert found.cpu
    assert 2**28 < found.memory_total >= found.memory_available > 0


def test_a_system_without_proc_reveals_less(fake_system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: None)
    found = machine.describe_machine()
    assert found.features == ()
    assert found.memory_available > 0  # psutil knows other systems too


@pytest.mark.parametrize(
    ("kind", "flags", "exact"),
    [
        ("x86_64", "avx2 avx_vnni", True),
        ("AMD64", "avx2 avx512_vnni", True),
        ("x86_64", "avx2 avx512f", False),
        ("AMD64", "", False),  # Windows: the features are unknown
        ("aarch64", "asimd", True),
    ],
)
def test_byte_sums_are_exact_with_vnni(
    kind: str, flags: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: kind)
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: flags if key == "flags" else "")
    assert machine.has_exact_byte_sums() is exact


def test_memory_bandwidth_is_plausible() -> None:
    assert 0.1 < machine.memory_bandwidth(megabytes=16, seconds=0.02) < 10_000
