"""Memory does not grow over many sessions and many runs."""

from __future__ import annotations

import ctypes
import gc
import mmap
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from device_stand_ins import CudaOnCpu
from slot_models import VOCAB, save_slot_model

from carryall.providers.base import Provider, Row, RunnerConfig
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.process.garbage import lasting_objects

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_megabytes() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def heap_megabytes() -> float:
    """Return the allocated bytes in MB, without free memory of the allocator; 0 without glibc."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        return 0.0
    call.restype = _Mallinfo2
    return float(call().uordblks / 1e6)


class Growth(NamedTuple):
    resident: float
    heap: float


def growth(work: Callable[[int], None], warm: int, times: int) -> Growth:
    """Return the growth of memory in MB over the last ``times`` calls, a multiple of 5.

    A leak grows in every window of calls. The resident pages also grow once by some MB, when a thread gets an
    arena of the allocator, at a time that depends on the load: the median of five windows ignores that.
    """
    for i in range(warm):
        work(i)
    heap, resident = heap_megabytes(), [resident_megabytes()]
    for i in range(times):
        work(warm + i)
        if (i + 1) % (times // 5) == 0:
            resident.append(resident_megabytes())
    return Growth(5 * statistics.median(np.diff(resident).tolist()), heap_megabytes() - heap)


@pytest.mark.parametrize("once", [0, 40], ids=["quiet", "arena"])
def test_a_leak_of_20_kilobytes_a_run_is_seen(once: int) -> None:
    """Also beside pages that one run keeps; and such pages alone are no leak."""
    kept = []

    def pages(size: int) -> None:
        kept.append(mmap.mmap(-1, size))
        kept[-1].write(b"x" * size)

    def arena(i: int) -> None:
        if i == once:
            pages(20_000_000)

    def leak(i: int) -> None:
        arena(i)
        pages(20_480)

    assert growth(leak, warm=10, times=100).resident > 100 * 0.02 * 0.9
    assert growth(arena, warm=10, times=100).resident < 0.5


def test_allocations_that_stay_are_seen() -> None:
    kept = []
    assert growth(lambda i: kept.append(bytes(20_000)), warm=10, times=100).heap > 100 * 0.02 * 0.9


@pytest.fixture(scope="module", autouse=True)
def older_objects() -> Iterator[None]:
    """Exclude the objects of all other tests from the collections here, which would take most of the time."""
    with lasting_objects():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slot_model(tmp_path_factory.mktemp("leaks") / "model.onnx")


PROVIDERS = pytest.mark.parametrize("provider", [CpuProvider(), CudaOnCpu()], ids=["cpu", "device"])


@pytest.mark.long
@PROVIDERS
@pytest.mark.parametrize("times", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_opening_and_closing_runners(model: Path, provider: Provider, times: int) -> None:
    def work(i: int) -> None:
        runner = provider.runner(model, RunnerConfig(max_slots=2, num_threads=1))
        runner.forward([Row(0, np.arange(5) % VOCAB, 0)])
        runner.close()

    grown = growth(work, warm=50, times=times)
    # onnxruntime itself keeps some 50 bytes a session: 0.1 MB after 2,500 sessions without a line of ours.
    assert grown.heap < 0.2
    assert grown.resident < 4  # pages that the allocators of threads keep; no more after 2,500 than after 250


@pytest.mark.long
@PROVIDERS
@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_runs_of_every_length(model: Path, provider: Provider, times: int) -> None:
    """Prompts of new lengths and decode batches of new sizes do not accumulate memory."""
    runner = provider.runner(model, RunnerConfig(max_slots=8, num_threads=1))
    rng = np.random.default_rng(0)

    def work(i: int) -> None:
        slot = i % 8
        runner.release(slot)
        length = int(rng.integers(2, 60))
        runner.forward([Row(slot, rng.integers(0, VOCAB, length), 0)])
        runner.forward([Row(slot, rng.integers(0, VOCAB, 1), length)])

    grown = growth(work, warm=200, times=times)
    assert grown.heap < 0.2
    assert grown.resident < 4
    runner.close()
