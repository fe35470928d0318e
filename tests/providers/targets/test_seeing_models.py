"""Pictures in prompts on CUDA with paged KV, with the CPU as the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_stand_ins import CudaOnCpu, PagedCudaOnCpu, threaded
from kernel_rules import CPU, CUDA
from kernel_table import KernelTable, misfits
from tiny_vlms import write_vlm

import carryall
from carryall.graph_opt.graph.saving import save_model
from carryall.providers import get_provider
from carryall.providers.base import Provider, Row, Runner, RunnerConfig
from carryall.providers.ort.paged import OrtPagedSession
from carryall.providers.ort.slot_runner import SlotRunner
from carryall.providers.runners.paged_runner import PagedBatch, PagedRunner
from carryall.providers.targets import cuda
from carryall.providers.targets.cuda import CudaProvider
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.lowering import image_inputs
from carryall.runtime.models.model_source import SourceModel, resolve_model

CONTEXT = 64
CONFIG = RunnerConfig(max_slots=2, context_length=CONTEXT, num_threads=1)
TEXT = np.arange(1, 13)
IN_BLOCKS, EXPLICIT = ["smolvlm", "qwen3_vl"], ["gemma3"]


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceModel:
    carryall.export(write_vlm(tmp_path / "checkpoint", request.param), tmp_path / "package")
    return resolve_model(tmp_path / "package")


def opened(source: SourceModel, provider: Provider, folder: Path, **options: Any) -> Runner:
    config = dataclasses.replace(CONFIG, options=options)
    save_model(lower(source, provider, config, [image_inputs()]), folder / f"{provider.name}.onnx")
    return provider.runner(folder / f"{provider.name}.onnx", config)


def pictured(runner: Runner) -> dict[str, Any]:
    """Return what a row has for a picture of four states, of the fourth to the seventh token."""
    info, rows = runner.info, np.full(8, -1)
    rows[3:7] = np.arange(4)
    states = np.random.default_rng(0).normal(size=(4, info.image_width)).astype(np.float32)
    row: dict[str, Any] = {"image_states": states, "image_rows": rows}
    if info.rope_axes:
        row["rope_positions"] = np.stack([np.arange(12), np.arange(12) // 2, np.arange(12) % 3])
    if info.image_ahead:
        row["image_ahead"] = np.array([0, 0, 0, 3, 2, 1, 0], np.int32)
    return row


def logits(runner: Runner) -> np.ndarray[Any, Any]:
    """Return the logits of a prompt with a picture and one without, and of steps of both."""
    found = [runner.forward([Row(0, TEXT, 0, num_logits=12, **pictured(runner)), Row(1, TEXT[:5], 0)])]
    found[0] = [part.copy() for part in found[0]]
    for step in range(3):
        axes = runner.info.rope_axes
        places = np.full((axes, 1), 12 + step) if axes else None
        rows = [Row(0, TEXT[:1], 12 + step, rope_positions=places), Row(1, TEXT[:1], 5 + step)]
        found.append([part.copy() for part in runner.forward(rows)])
    runner.close()
    return np.concatenate([part for parts in found for part in parts])


@pytest.mark.long
@pytest.mark.parametrize("source", [*IN_BLOCKS, *EXPLICIT], indirect=True)
def test_prompts_with_pictures_have_the_logits_of_the_cpu(source: SourceModel, tmp_path: Path) -> None:
    expected = logits(
        opened(source, get_provider("cpu"), tmp_path, kernels="onnxruntime", kv_memory="explicit")
    )
    np.testing.assert_allclose(logits(opened(source, PagedCudaOnCpu(), tmp_path)), expected, atol=3e-5)


@pytest.mark.long
@pytest.mark.parametrize("source", IN_BLOCKS, indirect=True)
def test_steps_without_a_new_picture_are_captured(
    source: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_GRAPH_BYTES", 1)  # as many as there are
    runner = opened(source, PagedCudaOnCpu(), tmp_path)
    sizes, exact = list[int](), OrtPagedSession._exact

    def counted(session: OrtPagedSession, batch: PagedBatch) -> Any:
        sizes.append(len(batch.input_ids))
        return exact(session, batch)

    monkeypatch.setattr(OrtPagedSession, "_exact", counted)
    runner.forward([Row(0, TEXT, 0, **pictured(runner))])
    assert sizes == [12]
    for step in range(3):
        runner.forward([Row(0, TEXT[:1], 12 + step)])
    runner.forward([Row(1, TEXT, 0)])
    assert sizes == [12]
    runner.close()


@pytest.mark.long
@pytest.mark.parametrize("source", [*IN_BLOCKS, *EXPLICIT], indirect=True)
def test_every_node_has_a_kernel(source: SourceModel) -> None:
    config = dataclasses.replace(CONFIG, options={"kv_memory": "paged"})
    model = lower(source, CudaProvider(), config, [image_inputs()])
    assert misfits(model, KernelTable("cuda", CUDA), KernelTable("cpu", CPU)) == []


@pytest.mark.long
@pytest.mark.parametrize("source", ["smolvlm", "gemma3"], indirect=True)
def test_by_default_pictures_are_taken_where_kv_is_in_blocks(
    source: SourceModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Explicit KV, which would take Gemma 3's, is far slower for all texts."""
    runner = opened(source, PagedCudaOnCpu(), tmp_path, kv_memory="auto", joint_prompts=False)
    in_blocks = source.config["model_type"] != "gemma3"
    assert isinstance(threaded(runner), PagedRunner if in_blocks else SlotRunner)
    assert bool(runner.info.image_width) is in_blocks
    assert ("KV is in slots, not in blocks: " in caplog.text) is not in_blocks
    runner.close()


def test_slots_take_no_pictures() -> None:
    assert not CudaOnCpu().takes_images(CONFIG)
    assert PagedCudaOnCpu().takes_images(CONFIG)
    others = ("webgpu", "directml", "tensorrt", "openvino", "null")
    assert not any(get_provider(name).takes_images(CONFIG) for name in others)
