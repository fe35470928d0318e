"""Facts of this machine: usable cores, instruction sets, memory size and memory bandwidth."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...records import dataclass

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_X86_FEATURES = (
    *("avx2", "f16c", "fma", "avx_vnni"),
    *("avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
)
_X86 = frozenset({"x86_64", "amd64", "i686", "x86"})  # names of the platform, in lower case
VNNI = frozenset({"avx_vnni", "avx512_vnni"})
_ARM_FEATURES = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine that decide how fast a model runs on its CPU."""

    system: str
    cpu: str
    logical_cores: int  # of the whole machine
    usable_cores: int  # physical cores this process may use, within its affinity and CPU quota
    features: tuple[str, ...]  # instruction sets of matrix kernels; empty if they cannot be read
    memory_total: int  # bytes, within the control group's limit
    memory_available: int  # bytes available without swapping, within the same limit


def describe_machine() -> Machine:
    """Return the facts of this machine; those that the system does not report are empty."""
    flags = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    total, available = memory()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=processor(),
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        features=tuple(name for name in (*_X86_FEATURES, *_ARM_FEATURES) if name in flags),
        memory_total=total,
        memory_available=available,
    )


def processor() -> str:
    """Return the name of the processor."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def has_exact_byte_sums() -> bool:
    """Whether kernels add products uint8 x int8 without saturation: on x86 that takes VNNI.

    An x86 processor whose features are unknown counts as one without.
    """
    on_x86 = platform.machine().lower() in _X86
    return not on_x86 or bool(VNNI & set(describe_machine().features))


def usable_cores() -> int:
    """Return the number of physical cores within the process's affinity and its control group's CPU quota.

    Hardware threads of one core share its arithmetic units, so matrix kernels gain nothing from the second.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    quota = _cpu_quota()
    return max(1, min(len(cores), math.ceil(quota)) if quota is not None else len(cores))


def memory() -> tuple[int, int]:
    """Return total and available memory in bytes, within the limits of the process's control groups."""
    limits = [_machine_memory(), *_memory_limits()]
    return min(total for total, _ in limits), max(0, min(available for _, available in limits))


def _machine_memory() -> tuple[int, int]:
    """Return total and available bytes of the machine."""
    facts = dict(line.split(":") for line in (_read(Path("/proc/meminfo")) or "").splitlines())
    if "MemAvailable" in facts:  # in units of 1,024 bytes (proc(5))
        return int(facts["MemTotal"].split()[0]) * 1024, int(facts["MemAvailable"].split()[0]) * 1024
    import psutil  # 10 ms

    found = psutil.virtual_memory()
    return found.total, found.available


def memory_bandwidth(threads: int | None = None, megabytes: int = 256, seconds: float = 0.4) -> float:
    """Measure the memory read bandwidth of all usable cores together, in GB/s (1e9 bytes).

    It takes the best of several passes over a buffer far larger than the caches, as STREAM does (McCalpin,
    1995), but only reads, as decoding does.
    """
    threads = threads or usable_cores()
    data = np.ones(megabytes * 2**20 // 4, np.float32)
    parts = np.array_split(data, threads)
    best, deadline = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < deadline or best == math.inf:
        best = min(best, _read_once(parts))
    return data.nbytes / best / 1e9


def _read_once(parts: list[npt.NDArray[np.float32]]) -> float:
    """Return the seconds in which one thread per part reads all parts."""
    # np.max is faster than the memory on one core, uses no BLAS threads, and releases the GIL.
    workers = [threading.Thread(target=np.max, args=(part,)) for part in parts]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def _siblings(cpu: int) -> str:
    """Return an identifier of the physical core of a logical one."""
    text = _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return text if text is not None else str(cpu)


def _cpu_quota() -> float | None:
    """Return the number of CPUs that the control groups (v2 and v1) allow; None if it is not limited."""
    quotas = []
    for folder in _groups():
        words = (_read(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    quota = _read(_CGROUPS / "cpu" / "cpu.cfs_quota_us")
    period = _read(_CGROUPS / "cpu" / "cpu.cfs_period_us")
    if quota is not None and period is not None and int(quota) > 0:
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limits() -> list[tuple[int, int]]:
    """Return total and available bytes of each control group (v2 and v1) with a memory limit."""
    names = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _groups()]
    old = (_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limits = []
    for folder, most, used, cached in [*names, old]:
        limit, usage = _read(folder / most), _read(folder / used)
        if limit is None or usage is None or not limit.isdecimal():
            continue
        # The kernel reclaims inactive file pages, so they count as available.
        statistics = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
        limits.append((int(limit), int(limit) - int(usage) + int(statistics.get(cached, 0))))
    return limits


def _groups() -> list[Path]:
    """Return the folders of this process's control group (v2) and its parents."""
    lines = (_read(Path("/proc/self/cgroup")) or "").splitlines()
    own = _CGROUPS / next((line[3:] for line in lines if line[:3] == "0::"), "/").strip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(_CGROUPS)]


def _cpuinfo(key: str) -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
