"""Memory stays flat over many sessions and many runs."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_stand_ins import CudaOnCpu
from slot_models import VOCAB, save_slot_model

from carryall.providers.base import Provider, Row, RunnerConfig
from carryall.providers.cpu import CpuProvider

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_megabytes() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6


def growth(work: Callable[[int], None], warm: int, times: int) -> float:
    """Megabytes that resident memory grows by over the last ``times`` calls."""
    for i in range(warm):
        work(i)
    before = resident_megabytes()
    for i in range(times):
        work(warm + i)
    return resident_megabytes() - before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slot_model(tmp_path_factory.mktemp("leaks") / "model.onnx")


PROVIDERS = pytest.mark.parametrize("provider", [CpuProvider(), CudaOnCpu()], ids=["cpu", "device"])


@PROVIDERS
@pytest.mark.parametrize("times", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_opening_and_closing_runners(model: Path, provider: Provider, times: int) -> None:
    def work(i: int) -> None:
        runner = provider.runner(model, RunnerConfig(max_slots=2, num_threads=1))
        runner.forward([Row(0, np.arange(5) % VOCAB, 0)])
        runner.close()

    assert growth(work, warm=50, times=times) < 4 + times / 125  # the allocator takes up to 10 kB a runner


@PROVIDERS
@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_runs_of_every_length(model: Path, provider: Provider, times: int) -> None:
    """Neither prompts of ever new lengths nor decode batches of ever new sizes keep memory."""
    runner = provider.runner(model, RunnerConfig(max_slots=8, num_threads=1))
    rng = np.random.default_rng(0)

    def work(i: int) -> None:
        slot = i % 8
        runner.release(slot)
        length = int(rng.integers(2, 60))
        runner.forward([Row(slot, rng.integers(0, VOCAB, length), 0)])
        runner.forward([Row(slot, rng.integers(0, VOCAB, 1), length)])

    assert growth(work, warm=200, times=times) < 4
    runner.close()
