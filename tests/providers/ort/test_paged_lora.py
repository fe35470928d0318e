"""LoRA adapters with KV in blocks on a device, with the CPU as the device: matrices stay there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from device_stand_ins import PagedCudaOnCpu, threaded
from tiny_lora import layers_of, write_adapter
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError
from carryall.exporter.adapter import read_adapter
from carryall.providers.base import Provider, Row, Runner, RunnerConfig
from carryall.providers.ort.paged import OrtPagedSession
from carryall.providers.runners.paged_runner import PagedBatch
from carryall.providers.targets import cuda
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.models.lowering import lora_branches, lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model

SLOTS = 4
PROMPTS = [np.random.default_rng(slot).integers(5, 250, 5 + 12 * (slot % 2)) for slot in range(SLOTS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    base = write_tiny("llama", tmp_path / "base", dtype=np.float32)
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, layers_of(base), seed=seed)
    return tmp_path


def opened(folder: Path, provider: Provider, **options: Any) -> Runner:
    source = resolve_model(folder / "base")
    given = RunnerConfig(max_slots=SLOTS, max_loras=2, max_lora_rank=4, num_threads=1, options=options)
    config = with_context(given, source)
    graph = lowered_model(source, provider, config, changes=[lora_branches(source, ())])
    return provider.runner(graph, config)


def story(runner: Runner, folder: Path) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits of steps between which adapters are loaded, with and without them."""
    starts = [0] * SLOTS

    def load(place: int, name: str) -> None:
        found = read_adapter(folder / name, runner.info.lora_modules, runner.info.max_lora_rank)
        runner.load_lora(place, found.matrices)

    def step(*places: int | None, tokens: int = 1) -> npt.NDArray[np.float32]:
        rows = [
            Row(slot, PROMPTS[slot][:tokens], starts[slot], lora=place) for slot, place in enumerate(places)
        ]
        found = np.concatenate([logits.copy() for logits in runner.forward(rows)])
        for row in rows:
            starts[row.slot] += len(row.tokens)
        return found

    yield step(None, None)
    load(0, "a")
    yield step(0, None, 0, tokens=17)
    load(1, "b")
    yield step(0, 1, None, 1)
    yield step(1, 1, 0, None)
    load(0, "c")
    yield step(0, None, 0, 1)
    runner.close()


@pytest.mark.long
def test_steps_are_captured_and_have_the_logits_of_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = OrtPagedSession._exact

    def refused(session: OrtPagedSession, batch: PagedBatch) -> Any:
        assert not session.pads, "a run is not captured"
        return exact(session, batch)

    monkeypatch.setattr(OrtPagedSession, "_exact", refused)
    monkeypatch.setattr(cuda, "_GRAPH_BYTES", 1)  # as many as there are
    expected = list(story(opened(folder, CpuProvider(), kernels="onnxruntime"), folder))
    runner = opened(folder, PagedCudaOnCpu())
    assert threaded(runner).session.pads
    for found, wanted in zip(story(runner, folder), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert np.abs(expected[3] - expected[4]).max() > 0.1


@pytest.mark.long
def test_adapters_reach_runs_that_are_not_captured(folder: Path) -> None:
    expected = list(story(opened(folder, CpuProvider(), kernels="onnxruntime"), folder))
    found = list(story(opened(folder, PagedCudaOnCpu(), cuda_graphs=False), folder))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


@pytest.mark.long
def test_their_memory_is_not_for_kv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = opened(folder, PagedCudaOnCpu())
    held = sum(array.nbytes for array in threaded(runner)._loras.arrays.values())
    runner.close()
    monkeypatch.setattr(PagedCudaOnCpu, "free_memory", lambda self, options: held)
    with pytest.raises(ProviderRuntimeError, match=r"logits and adapters take"):
        opened(folder, PagedCudaOnCpu(), memory_fraction=1.0, cuda_graphs=False)
    monkeypatch.setattr(PagedCudaOnCpu, "free_memory", lambda self, options: held + (1 << 20))
    opened(folder, PagedCudaOnCpu(), memory_fraction=1.0, cuda_graphs=False).close()
