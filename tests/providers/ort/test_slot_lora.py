"""LoRA adapters of the slot runner on the host and on device memory, with the CPU as the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_lora import layers_of, write_adapter
from tiny_models import write_tiny

from carryall.exporter.adapter import LoraAdapter, read_adapter
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import Device, DeviceSlots
from carryall.providers.ort.slot_memory import HostMemory
from carryall.providers.ort.slot_policy import SlotPolicy, powers_of_two
from carryall.providers.ort.slot_runner import SlotRunner
from carryall.providers.targets.cpu import CpuProvider
from carryall.runtime.models.lowering import lora_branches, lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model

SLOTS = 4
CONFIG = RunnerConfig(max_slots=SLOTS, max_loras=2, max_lora_rank=4)
DEVICES = {
    "resident": (Device(name="cpu"), SlotPolicy()),
    "captured": (Device(name="cpu"), SlotPolicy(buckets=powers_of_two(SLOTS), capture=True)),
    "handles": (Device(name="cpu", addressable=False), SlotPolicy(max_hole=0, max_rows=1)),
    "no-addresses": (
        Device(name="cpu", addressable=False, updates=False),
        SlotPolicy(prompts_on_cache=False, max_rows=1),
    ),
}
PROMPTS = [np.random.default_rng(slot).integers(5, 250, 5 + 12 * (slot % 2)) for slot in range(SLOTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    base = write_tiny("llama", made / "base", dtype=np.float32)
    for seed, name in enumerate("abc"):
        write_adapter(made / name, layers_of(base), seed=seed)
    return made


@pytest.fixture(scope="module")
def graph(folder: Path) -> Iterator[Path]:
    """A lowered graph with branches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(folder / "cache"))
        source = resolve_model(folder / "base")
        config = with_context(RunnerConfig(max_loras=1), source)
        branches = lora_branches(source, ())
        yield lowered_model(source, CpuProvider(), config, changes=[branches])


def opener(content: bytes) -> Any:
    return ort.open_session(content, ort.CPU)


def make(graph: Path, device: Device | None, policy: SlotPolicy) -> SlotRunner:
    def memory(specs: Any, count: int, length: int) -> DeviceSlots | HostMemory:
        if device is None:
            return HostMemory(specs, count, length)
        return DeviceSlots(specs, count, length, device=device, session_factory=opener)

    session = ort.open_session(graph, ort.CPU, ort.session_options(1, fixed_shapes=False))
    return SlotRunner(session, CONFIG, str(graph), memory=memory, policy=policy)


def story(runner: SlotRunner, folder: Path) -> list[np.ndarray[Any, Any]]:
    """Return the logits of prompts and decode steps; the adapter of place 0 is replaced in the middle."""
    adapters = {
        name: read_adapter(folder / name, runner.info.lora_modules, runner.info.max_lora_rank)
        for name in "abc"
    }
    found: list[np.ndarray[Any, Any]] = []

    def step(places: list[int | None], start: int | None) -> None:
        rows = [
            Row(slot, PROMPTS[slot], 0, 1, lora=place)
            if start is None
            else Row(slot, np.array([7 + slot]), len(PROMPTS[slot]) + start, 1, lora=place)
            for slot, place in enumerate(places)
        ]
        found.extend(logits.copy() for logits in runner.forward(rows))

    def load(place: int, adapter: LoraAdapter) -> None:
        runner.load_lora(place, adapter.matrices)

    load(0, adapters["a"])
    load(1, adapters["b"])
    step([0, 1, None, 0], None)
    for start in range(3):
        step([0, 1, None, 0], start)
    step([None] * SLOTS, 3)
    load(0, adapters["c"])
    step([0, 1, None, 0], None)
    step([0, 1, None, 0], 0)
    step([None, None, None, 0], 1)
    return found


@pytest.fixture(scope="module")
def expected(graph: Path, folder: Path) -> list[np.ndarray[Any, Any]]:
    runner = make(graph, None, SlotPolicy())
    found = story(runner, folder)
    runner.close()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_devices_give_the_logits_of_the_host(
    graph: Path, folder: Path, expected: list[np.ndarray[Any, Any]], device: str
) -> None:
    runner = make(graph, *DEVICES[device])
    found = story(runner, folder)
    runner.close()
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_another_adapter_gives_other_logits(expected: list[np.ndarray[Any, Any]]) -> None:
    before, after = expected[:SLOTS], expected[5 * SLOTS : 6 * SLOTS]
    changed = [np.abs(a - b).max() > 1e-3 for a, b in zip(before, after, strict=True)]
    assert changed == [True, False, False, True]
