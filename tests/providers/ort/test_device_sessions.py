"""Providers with memory of their own that carryall knows nothing about, with the CPU as the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from device_session import DeviceSession, add_device
from slot_models import CONTEXT, LAYERS, VOCAB, reference_logits, save_slot_model
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.errors import ProviderUnavailableError
from carryall.exporter.export import export_package
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.ort import ort
from carryall.providers.ort.input_memory import device_inputs
from carryall.providers.targets.ep import PassThroughProvider
from carryall.runtime.api.bound_run import BoundRun

SLOTS = RunnerConfig(max_slots=3, options={"lowering": "slots"})


def test_slots_on_a_device_see_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host array that is bound once is copied once: the device would see the first step's input only."""
    machine = add_device(monkeypatch)
    model = save_slot_model(tmp_path / "model.onnx")
    runner = PassThroughProvider("CPU").runner(model, SLOTS)
    texts = [np.random.default_rng(seed).integers(0, VOCAB, 20) for seed in range(2)]
    for slot, text in enumerate(texts):
        runner.forward([Row(slot, text[:9], 0)])
    for end in range(10, 20):
        rows = [Row(slot, text[end - 1 : end], end - 1) for slot, text in enumerate(texts)]
        for text, logits in zip(texts, runner.forward(rows), strict=True):
            np.testing.assert_allclose(logits[0], reference_logits(text[:end])[-1], rtol=1e-4, atol=1e-4)
    runner.copy_prefix(0, 2, 12)
    (logits,) = runner.forward([Row(2, texts[0][12:14], 12)])
    np.testing.assert_allclose(logits[0], reference_logits(texts[0][:14])[-1], rtol=1e-4, atol=1e-4)
    # Keys and values of each layer, for each of three slots.
    assert sum(value.shape() == [1, 2, CONTEXT, 8] for value in machine.values) == 2 * LAYERS * 3
    runner.close()


@pytest.mark.long
@pytest.mark.parametrize("lowering", ["standard", "slots"])
def test_tokens_are_those_of_the_cpu_provider(
    lowering: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    made = export_package(write_tiny("qwen3", tmp_path / "checkpoint"), tmp_path / "package")
    params, prompts = SamplingParams(temperature=0, max_tokens=8), ["hello", "a b", "hello there"]
    with LLM(made.path, provider="cpu", max_slots=2) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    add_device(monkeypatch)
    options = {"lowering": lowering}
    with LLM(made.path, provider="ep:CPU", max_slots=2, provider_options=options) as llm:
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == expected


def test_caches_in_two_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = add_device(monkeypatch)
    machine.host_inputs |= {"past_key_values.0.value"}
    model = save_slot_model(tmp_path / "model.onnx")
    with pytest.raises(
        ProviderUnavailableError, match=r"'past_key_values.0.value'.* on the host.*lowering=standard"
    ):
        PassThroughProvider("CPU").runner(model, SLOTS)


def test_memory_that_cannot_be_allocated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = add_device(monkeypatch)

    def no_allocator(*_: object, **__: object) -> None:
        raise RuntimeError("No shared allocator found for: Device_Buf")

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", no_allocator)
    model = save_slot_model(tmp_path / "model.onnx")
    with pytest.raises(
        ProviderUnavailableError, match=r"in Device_Buf, .*No shared allocator.*lowering=standard"
    ):
        PassThroughProvider("CPU").runner(model, SLOTS)
    assert not machine.values


def test_wrong_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose attention forgets the cache where several tokens come at once."""
    model = save_slot_model(tmp_path / "model.onnx")
    add_device(monkeypatch)
    run = DeviceSession.run_with_iobinding

    def forgetful(self: DeviceSession, binding: object, options: object = None) -> None:
        run(self, binding, options)  # type: ignore[arg-type]
        for _, host in binding.results:  # type: ignore[attr-defined]
            if host.shape()[-1] == VOCAB and host.shape()[1] > 1:
                host.numpy()[...] = 0

    monkeypatch.setattr(DeviceSession, "run_with_iobinding", forgetful)
    with pytest.raises(ProviderUnavailableError, match=r"16 tokens at once .* differ.*lowering=standard"):
        PassThroughProvider("CPU").runner(model, SLOTS)


def test_inputs_on_a_device_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_slot_model(tmp_path / "model.onnx")
    assert device_inputs(ort.open_session(model, ort.CPU)) == {}
    add_device(monkeypatch)
    found = device_inputs(ort.open_session(model, ort.CPU))
    assert "total_sequence_length" not in found
    assert {info.name for info in found.values()} == {"Device_Buf"}


def test_bound_host_arrays_are_read_at_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``BoundRun`` promises, wherever the provider computes."""
    from onnx_ir import from_onnx_text, save

    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float[3] y) { y = Add(x, x) }'
    save(from_onnx_text(text), tmp_path / "model.onnx")
    add_device(monkeypatch)
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    bound = BoundRun(ort.open_session(tmp_path / "model.onnx", ort.CPU), {"x": x}, {"y": y})
    for step in range(3):
        x[...] = step
        bound.run()
        np.testing.assert_array_equal(y, np.full(3, 2 * step, np.float32))
