"""The slot runner on device memory, with the CPU as the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from slot_models import CONTEXT, VOCAB, reference_logits, save_slot_model

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.captures import no_capture
from carryall.providers.kv.kv_memory import KVSpec
from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import Device, DeviceSlots
from carryall.providers.ort.slot_policy import SlotPolicy, powers_of_two
from carryall.providers.ort.slot_runner import SlotRunner

Tokens = npt.NDArray[np.int64]
SLOTS = 6
CAPTURING = SlotPolicy(buckets=powers_of_two(SLOTS), capture=True)
ONE_BY_ONE = Device(name="cpu", addressable=False, updates=False)
JOINT = SlotPolicy(joint_prompts=True, joint_tokens=64, max_padding=8)
CASES = {
    "resident": (Device(name="cpu"), SlotPolicy()),
    "joint": (Device(name="cpu"), JOINT),
    "captured": (Device(name="cpu"), CAPTURING),
    "whole-prompts": (Device(name="cpu"), SlotPolicy(prompts_on_cache=False)),
    "handles": (Device(name="cpu", addressable=False), SlotPolicy(max_hole=0, max_rows=1)),
    "no-addresses": (ONE_BY_ONE, SlotPolicy(prompts_on_cache=False, max_rows=1)),
}


def sequence(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def check(got: npt.NDArray[np.float32], tokens: Tokens) -> None:
    np.testing.assert_allclose(got, reference_logits(tokens)[-len(got) :], rtol=1e-4, atol=1e-4)


def opener(content: bytes) -> Any:
    return ort.open_session(content, ort.CPU)


def device_runner(path: Path, device: Device, policy: SlotPolicy, slots: int = SLOTS) -> SlotRunner:
    def memory(specs: dict[str, KVSpec], count: int, length: int) -> DeviceSlots:
        return DeviceSlots(specs, count, length, device=device, session_factory=opener)

    session = ort.open_session(path, ort.CPU, ort.session_options(1, fixed_shapes=False))
    config = RunnerConfig(max_slots=slots)
    return SlotRunner(session, config, str(path), memory=memory, policy=policy)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slot_model(tmp_path_factory.mktemp("slots") / "model.onnx")


@pytest.fixture(params=CASES)
def runner(model: Path, request: pytest.FixtureRequest) -> Iterator[SlotRunner]:
    runner = device_runner(model, *CASES[request.param])
    yield runner
    runner.close()


def test_a_step_mixes_decode_prompts_chunks_and_holes(runner: SlotRunner) -> None:
    texts = [sequence(length, length) for length in (9, 8, 17, 5, 11, 7)]
    runner.forward([Row(0, texts[0][:8], 0), Row(1, texts[1][:6], 0), Row(2, texts[2][:16], 0)])
    runner.forward([Row(4, texts[4][:4], 0, num_logits=0)])
    rows = [Row(5, texts[5], 0), Row(2, texts[2][16:], 16), Row(4, texts[4][4:], 4), Row(0, texts[0][8:], 8)]
    for row, logits in zip(rows, runner.forward(rows), strict=True):
        check(logits, texts[row.slot])
    for row in (Row(1, texts[1][6:], 6), Row(3, texts[3], 0, num_logits=3)):
        check(runner.forward([row])[0], texts[row.slot])


def test_new_prompts_of_adjacent_slots_share_a_run(model: Path) -> None:
    runner = device_runner(model, Device(name="cpu"), JOINT)
    texts = [sequence(length, length) for length in (14, 9, 13, 20, 11)]
    runner.forward([Row(3, texts[3][:5], 0)])
    runner.bindings.clear()
    rows = [
        Row(2, texts[2], 0),
        Row(0, texts[0][:12], 0),
        Row(3, texts[3][5:], 5),  # on a cache
        Row(1, texts[1], 0, num_logits=0),
        Row(4, texts[4], 0, num_logits=2),  # wants more than its slot's array holds
    ]
    for row, logits in zip(rows, runner.forward(rows), strict=True):
        assert len(logits) == row.num_logits
        if row.num_logits:
            check(logits, texts[row.slot][: row.start + len(row.tokens)])
    assert {key[1:] for key in runner.bindings.runs} == {(0, 3), (3, 1), (4, 1)}
    check(runner.forward([Row(0, texts[0][12:], 12)])[0], texts[0])  # overwrites padding
    check(runner.forward([Row(1, texts[1][-1:], 8)])[0], texts[1])
    runner.run_prompts_alone()
    runner.bindings.clear()
    runner.forward([Row(0, texts[0], 0), Row(1, texts[1], 0)])
    assert {key[1:] for key in runner.bindings.runs} == {(0, 1), (1, 1)}
    runner.close()


def test_decode_goes_on_for_many_steps(runner: SlotRunner) -> None:
    """Captured runs are replayed: only the contents of their inputs change."""
    texts = [sequence(30, slot) for slot in range(3)]
    for slot, text in enumerate(texts):
        runner.forward([Row(slot, text[: 5 + slot], 0)])
    for step in range(8):
        ends = [6 + slot + step for slot in range(3)]
        rows = [Row(slot, texts[slot][end - 1 : end], end - 1) for slot, end in enumerate(ends)]
        for logits, text, end in zip(runner.forward(rows), texts, ends, strict=True):
            check(logits, text[:end])


def test_a_full_slot_is_not_overwritten_by_its_neighbours(runner: SlotRunner) -> None:
    full, other = sequence(CONTEXT, 1), sequence(9, 2)
    runner.forward([Row(1, full, 0), Row(0, other[:8], 0), Row(2, other[:8], 0)])
    for logits in runner.forward([Row(0, other[8:], 8), Row(2, other[8:], 8)]):
        check(logits, other)
    check(runner.forward([Row(1, full[-1:], CONTEXT - 1)])[0], full)


def test_copied_prefix_continues_like_the_original(runner: SlotRunner) -> None:
    tokens = sequence(16, 8)
    runner.forward([Row(0, tokens, 0)])
    for target in (4, 2):
        runner.copy_prefix(0, target, 10)
        other = np.append(tokens[:10], sequence(5, 9 + target))
        check(runner.forward([Row(target, other[10:], 10)])[0], other)
    runner.release(0)
    with pytest.raises(ProviderRuntimeError, match="holds 0"):
        runner.forward([Row(0, tokens[:1], 16)])


@pytest.mark.parametrize("device", [Device(name="cpu"), ONE_BY_ONE], ids=["addresses", "values"])
def test_caches_start_at_zero(device: Device) -> None:
    specs = {"past_key_values.0.key": KVSpec(2, 8, np.dtype(np.float32))}
    memory = DeviceSlots(specs, 3, 16, device=device, session_factory=opener)
    (values,) = memory._caches.values()
    assert sum(value.numpy().size for value in values) == 3 * 2 * 16 * 8
    assert not any(value.numpy().any() for value in values)


@pytest.mark.parametrize("kv", [ir.DataType.FLOAT16, ir.DataType.INT8])
def test_other_cache_types(tmp_path: Path, kv: ir.DataType) -> None:
    model = save_slot_model(tmp_path / "model.onnx", kv=kv)
    runner, tokens = device_runner(model, Device(name="cpu"), CAPTURING, 3), sequence(20, 12)
    runner.forward([Row(0, tokens[:19], 0)])
    runner.copy_prefix(0, 2, 19)
    for logits in runner.forward([Row(0, tokens[19:], 19), Row(2, tokens[19:], 19)]):
        np.testing.assert_allclose(logits[0], reference_logits(tokens)[-1], atol=1.5)
    runner.close()


def test_decode_runs_have_few_shapes(model: Path) -> None:
    runner = device_runner(model, *CASES["captured"])
    for slot in range(SLOTS):
        runner.forward([Row(slot, sequence(2, slot), 0)])
    for count in range(1, SLOTS + 1):
        runner.forward([Row(slot, sequence(1, 0), 2) for slot in range(count)])
        runner.forward([Row(slot, sequence(1, 0), 2) for slot in range(count)])
    runs = {key[1:]: run for key, run in runner.bindings.runs.items() if key[0] == "decode"}
    assert set(runs) == {(0, 1), (0, 2), (0, 4), (0, SLOTS)}
    graphs = {run.options.get_run_config_entry("gpu_graph_id") for run in runs.values()}
    assert graphs == {"1", "2", "3", "4"}
    runner.close()


def test_runs_are_captured_when_no_other_thread_opens_a_session(model: Path) -> None:
    runner = device_runner(model, *CASES["captured"])
    real, graphs = runner.session, []

    class Session:
        def io_binding(self) -> Any:
            return real.io_binding()

        def run_with_iobinding(self, binding: Any, options: Any) -> None:
            graphs.append(options.get_run_config_entry("gpu_graph_id"))
            real.run_with_iobinding(binding, options)

    tokens = sequence(6, 0)
    runner.forward([Row(0, tokens[:2], 0)])
    runner.session, graphs = Session(), []
    with no_capture():
        runner.forward([Row(0, tokens[2:3], 2)])
    runner.forward([Row(0, tokens[3:4], 3)])
    with no_capture():  # a replay does not capture
        (logits,) = runner.forward([Row(0, tokens[4:5], 4)])
    assert graphs == ["-1", "1", "1"]
    check(logits, tokens[:5])
    runner.close()


def test_no_room_says_what_to_lower(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = ort.load_onnxruntime("a test").OrtValue

    def full(*_: object) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 1")

    monkeypatch.setattr(value, "ortvalue_from_shape_and_type", full)
    with pytest.raises(ProviderRuntimeError, match=r"cpu:0 has no memory for 'past.*Lower max_slots"):
        device_runner(model, Device(name="cpu"), SlotPolicy())


def test_slots_without_shared_addresses_run_separately(model: Path) -> None:
    runner = device_runner(model, ONE_BY_ONE, SlotPolicy(), 2)
    runner.forward([Row(0, sequence(2, 0), 0), Row(1, sequence(2, 0), 0)])
    with pytest.raises(ProviderRuntimeError, match="one slot at a time, not 2"):
        runner.forward([Row(0, sequence(1, 0), 2), Row(1, sequence(1, 0), 2)])
    runner.close()


class Addresses:
    """A binding that keeps the address of each input."""

    def __init__(self) -> None:
        self.inputs: dict[str, int] = {}

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value.data_ptr()

    def bind_input(self, name: str, *described: Any) -> None:
        self.inputs[name] = described[-1]


def test_inputs_that_are_read_on_the_host_are_not_bound_on_the_device() -> None:
    """A device value would be copied to the host once, when it is bound, and later updates be lost."""
    names: dict[str, Any] = {"input_ids": np.zeros((1, 1), np.int64), "seqlens_k": np.zeros(1, np.int32)}
    specs = {"past_key_values.0.key": KVSpec(1, 8, np.dtype(np.float32))}
    memory = DeviceSlots(
        specs, 1, 8, device=Device(name="cpu"), session_factory=opener, host_inputs={"input_ids"}
    )
    binding = Addresses()
    memory.bind_step(binding, names, {}, capture=False)
    assert binding.inputs["input_ids"] == names["input_ids"].ctypes.data
    assert binding.inputs["seqlens_k"] != names["seqlens_k"].ctypes.data
