"""cuda, directml, tensorrt: the options they pass to onnxruntime, and messages where they cannot run."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from device_stand_ins import FREE_MEMORY, CudaOnCpu, TensorRTOnCpu, threaded
from slot_models import CONTEXT, save_slot_model
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError, ProviderUnavailableError, UsageError
from carryall.exporter.export import export_model, export_package
from carryall.graph_opt.pipeline import pipeline
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.providers.host import libraries, nvidia
from carryall.providers.host.libraries import Library
from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import slots_that_fit
from carryall.providers.ort.tensorrt_options import EngineCache, ShapeRange, input_shapes, model_facts
from carryall.providers.targets import nv_tensorrt_rtx
from carryall.providers.targets.cuda import CudaProvider
from carryall.providers.targets.nv_tensorrt_rtx import NvTensorRtRtxProvider
from carryall.providers.targets.tensorrt import TensorRTProvider

DEVICES = ["cuda", "tensorrt", "nv_tensorrt_rtx"]
ABSENT = Library(
    "cuBLAS 13", "libabsent.so.13", "absent_13.dll", "Install them with: pip install 'carryall[cuda]'"
)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime wheel with every provider and all their libraries."""
    monkeypatch.setattr(ort, "check_available", lambda name: None)
    monkeypatch.setattr(libraries, "missing", lambda wanted: [])
    monkeypatch.setattr(nvidia, "device_count", lambda: 1)
    monkeypatch.setattr(nvidia, "compute_capability", lambda index: (9, 0))


@pytest.mark.parametrize("name", DEVICES)
def test_a_wheel_without_the_provider(name: str) -> None:
    reason = get_provider(name).available()
    assert reason is not None
    assert f"{get_provider(name).execution_provider} is not part of onnxruntime" in reason


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.usefixtures("wheel")
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    provider = get_provider(name)
    assert provider.available() is None
    monkeypatch.setattr(libraries, "missing", lambda wanted: [ABSENT])
    reason = provider.available()
    assert str(reason).startswith(f"cannot load {ABSENT.file} (cuBLAS 13). {ABSENT.remedy}")
    with pytest.raises(ProviderUnavailableError, match="cuBLAS 13"):
        provider.session(tmp_path / "model.onnx")


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.usefixtures("wheel")
def test_no_device_or_no_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "device_count", lambda: 0)
    assert "no CUDA device" in str(get_provider(name).available())

    def too_old() -> int:
        raise ProviderUnavailableError("cudaGetDeviceCount failed: driver too old")

    monkeypatch.setattr(nvidia, "device_count", too_old)
    assert "driver too old" in str(get_provider(name).available())


def test_tensorrt_wants_its_own_libraries_too() -> None:
    wanted = {library.linux for library in TensorRTProvider().libraries()}
    assert {"libnvinfer.so.10", "libnvonnxparser.so.10", "libcudnn.so.9", "libcuda.so.1"} <= wanted


def test_directml_is_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert "exists on Windows only" in str(get_provider("directml").available())
    monkeypatch.setattr(sys, "platform", "win32")
    assert "DmlExecutionProvider is not part of" in str(get_provider("directml").available())


@pytest.mark.parametrize("cudnn", [True, False])
def test_cuda_gets_the_expected_options(cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda file: object() if cudnn else None)
    provider, options = CudaProvider(), CudaProvider().checked_options({"device": 2})
    asked = provider.provider_options(options, generating=True)
    assert (asked["device_id"], asked["enable_cuda_graph"]) == ("2", "1")
    assert ("enable_cudnn" in asked) is not cudnn
    other = provider.provider_options(options, generating=False)
    assert other["enable_cuda_graph"] == "0"
    assert "enable_cudnn" not in other
    assert (
        provider.provider_options({**options, "cuda_graphs": False}, generating=True)["enable_cuda_graph"]
        == "0"
    )


def test_cuda_computes_in_16_bits_only() -> None:
    with pytest.raises(UsageError, match="fp16 or bf16, not in fp32"):
        CudaProvider().passes(RunnerConfig(context_length=8, options={"compute": "fp32"}))
    with pytest.raises(UsageError, match="compute of provider 'cuda' must be one of fp16, bf16, fp32"):
        CudaProvider().passes(RunnerConfig(context_length=8, options={"compute": "fp8"}))


@pytest.mark.parametrize(
    ("capability", "version", "refused"),
    [
        ((7, 5), "1.31.1", False),
        ((8, 7), "1.31.1", False),
        ((9, 0), "1.31.1", False),
        ((12, 1), "1.31.0", False),
        ((7, 0), "1.31.1", True),
        ((10, 0), "1.31.1", True),
        ((10, 3), "1.31.1", True),
        ((11, 0), "1.31.1", True),
        ((10, 0), "1.99.0", False),  # its code is not known
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_device_without_code_in_the_wheel_is_refused_with_the_reason(
    capability: tuple[int, int],
    version: str,
    *,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ort, "installed_wheels", lambda: {"onnxruntime-gpu": version})
    monkeypatch.setattr(nvidia, "compute_capability", lambda index: capability)
    reason = CudaProvider().available()
    assert (reason is not None) is refused
    if refused:
        assert "neither code nor PTX; it has code for 7.5, 8.0, 8.6, 8.9, 9.0, 12.0." in str(reason)
        assert f"capability {capability[0]}.{capability[1]}" in str(reason)
        with pytest.raises(ProviderUnavailableError, match="neither code nor PTX"):
            CudaProvider().session(tmp_path / "model.onnx")


@pytest.mark.usefixtures("wheel")
def test_another_device_of_the_machine_may_have_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ort, "installed_wheels", lambda: {"onnxruntime-gpu": "1.31.1"})
    monkeypatch.setattr(nvidia, "device_count", lambda: 2)
    monkeypatch.setattr(nvidia, "enter", lambda index: None)
    monkeypatch.setattr(nvidia, "compute_capability", lambda index: [(10, 0), (9, 0)][index])
    assert CudaProvider().available() is None
    with pytest.raises(ProviderUnavailableError, match="device 0 has compute capability 10"):
        CudaProvider().session(tmp_path / "model.onnx")


class OldDevice(CudaOnCpu):
    name = "old-device"

    def compute_capability(self, index: int) -> tuple[int, int]:
        return 7, 5


def test_old_devices_run_without_what_their_kernels_lack() -> None:
    def settled(provider: CudaProvider, **options: Any) -> dict[str, Any]:
        return provider.resolve_options(RunnerConfig(options=options)).options

    kernels = {"kernels": "onnxruntime"}
    assert settled(CudaOnCpu()) == kernels
    old = {"device": 1, "kv_cache": "float32", "fused_experts": "off"}
    assert settled(OldDevice(), device=1) == old | kernels
    for option in ({"kv_cache": "int8"}, {"compute": "bf16"}, {"fused_experts": "on"}):
        with pytest.raises(ProviderUnavailableError, match=r"capability 8\.0, but device 0 has 7\.5"):
            settled(OldDevice(), **option)
        assert settled(CudaOnCpu(), **option) == option | kernels
    with pytest.raises(ProviderUnavailableError, match=r"kv_cache=fp8 needs compute capability 8\.9"):
        settled(CudaOnCpu(), kv_cache="fp8")


@pytest.mark.parametrize("fused", ["on", "off"])
def test_runs_with_computed_sizes_are_not_captured(
    fused: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """onnxruntime refuses to open a session for capture with a Split whose sizes come from the host."""
    provider, options = CudaOnCpu(), {"fused_experts": fused}
    config = RunnerConfig(max_slots=1, num_threads=1, context_length=32, options=options)
    model = pipeline.run(export_model(write_tiny("mixtral", tmp_path / "c")), provider.passes(config))[0]
    ir.save(model, tmp_path / "model.onnx")
    runner = provider.runner(tmp_path / "model.onnx", config)
    assert ("decode runs of" in caplog.text) is (fused == "off")
    assert threaded(runner)._policy.capture is (fused == "on")
    runner.close()


def test_kv_takes_what_memory_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert slots_that_fit(100, 30, 2, "") == 2
        assert not caplog.text
        assert slots_that_fit(100, 30, 9, "") == 3
    assert "hold 3 instead of 9 slots" in caplog.text
    with pytest.raises(ProviderRuntimeError, match=r"cannot hold one sequence.*Lower context_length"):
        slots_that_fit(100, 101, 9, "")
    model = save_slot_model(tmp_path / "model.onnx")
    config = RunnerConfig(max_slots=10**6, num_threads=1, options={"memory_fraction": 0.01})
    runner = CudaOnCpu().runner(model, config)
    slot = runner.info.kv_bytes_per_token * CONTEXT
    assert runner.info.max_slots == int(FREE_MEMORY * 0.01) // slot
    runner.close()


def test_profiles_span_every_run(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    ir.save(model, tmp_path / "model.onnx")
    shapes = input_shapes(tmp_path / "model.onnx")
    smallest, likeliest, largest = ShapeRange(chunk=16, context_length=64).profiles(shapes)
    assert smallest.startswith(
        "input_ids:1x1,attention_mask:1x1,position_ids:1x1,past_key_values.0.key:1x2x0x8,"
    )
    assert likeliest.startswith(
        "input_ids:1x1,attention_mask:1x17,position_ids:1x1,past_key_values.0.key:1x2x16x8"
    )
    assert largest.startswith(
        "input_ids:1x16,attention_mask:1x64,position_ids:1x16,past_key_values.0.key:1x2x63x8"
    )
    assert len(smallest.split(",")) == len(model.graph.inputs)


class Building(TensorRTOnCpu):
    """Writes an engine file like TensorRT, and counts the builds."""

    name = "building"
    built = 0

    def cache_options(self, folder: Path) -> dict[str, str]:
        if not (folder / "a.engine").exists():
            type(self).built += 1
            (folder / "a.engine").write_bytes(b"engine")
        return {}


def test_engines_are_built_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Building.built = 0
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    config = RunnerConfig(
        max_slots=1, num_threads=1, context_length=32, options={"cache_folder": str(tmp_path)}
    )
    pipeline.run(model, Building().passes(config))
    ir.save(model, tmp_path / "model.onnx")

    def start(changes: dict[str, Any] | None = None) -> None:
        given = RunnerConfig(
            max_slots=1, num_threads=1, context_length=32, options={**config.options, **(changes or {})}
        )
        Building().runner(tmp_path / "model.onnx", given).close()

    with caplog.at_level(logging.WARNING):
        start()
        assert "building TensorRT engines" in caplog.text
        caplog.clear()
        start()
        assert caplog.text == ""
        assert Building.built == 1
        (engine,) = (tmp_path / "tensorrt" / "engines").rglob("a.engine")
        engine.write_bytes(b"cut")
        start()
        assert "are damaged and are built again" in caplog.text
    assert Building.built == 2


def test_another_graph_or_other_weights_are_another_model(tmp_path: Path) -> None:
    graph, weights = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    graph.write_bytes(b"graph")
    weights.write_bytes(b"weights")
    first = model_facts(graph)
    assert model_facts(graph) == first
    weights.write_bytes(b"other weights")
    second = model_facts(graph)
    graph.write_bytes(b"graph 2")
    assert first != second != model_facts(graph)


def test_a_model_is_known_by_its_content(tmp_path: Path) -> None:
    package = export_package(write_tiny("llama", tmp_path / "checkpoint"), tmp_path / "package")
    first = model_facts(package.path / "model.onnx")
    copy = shutil.copytree(package.path, tmp_path / "copy", copy_function=shutil.copy)
    assert model_facts(copy / "model.onnx") == first  # independent of the time it was written
    before = (copy / "model.onnx.data").stat()
    with (copy / "model.onnx.data").open("r+b") as file:
        file.write(b"other")
    os.utime(copy / "model.onnx.data", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model_facts(copy / "model.onnx") != first


def test_an_engine_depends_on_all_facts(tmp_path: Path) -> None:
    facts = {"model": "a", "options": {"x": "1"}, "wheels": {"onnxruntime-gpu": "1.31.1"}}
    folders = {
        EngineCache(tmp_path, {**facts, **change}).folder
        for change in ({}, {"model": "b"}, {"options": {"x": "2"}}, {"wheels": {"onnxruntime-gpu": "1.32.0"}})
    }
    assert len(folders) == 4
    assert EngineCache(tmp_path, facts).folder in folders
    assert not EngineCache(tmp_path, facts).ready()


def test_tensorrt_needs_to_know_the_context(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="builds engines for RunnerConfig"):
        TensorRTProvider().shape_options(tmp_path, RunnerConfig(), TensorRTProvider().checked_options({}))


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
def test_networks_have_the_types_of_the_graph(compute: str) -> None:
    """onnxruntime 1.31 builds a strongly typed network only if no type is enabled."""
    provider = TensorRTProvider()
    own = provider.provider_options(provider.checked_options({"compute": compute}), generating=True)
    assert not [name for name in own if name.split("_")[1] in ("fp16", "bf16", "int8")]


def test_tensorrt_rtx_is_a_plugin_where_its_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = get_provider("nv_tensorrt_rtx")
    assert isinstance(provider, NvTensorRtRtxProvider)
    assert "carryall[tensorrt-rtx]" in str(provider.available())
    found = [object(), object()]
    monkeypatch.setattr(nv_tensorrt_rtx, "packaged_library", lambda module: Path(f"/{module}/plugin.so"))
    monkeypatch.setattr(nv_tensorrt_rtx, "plugin_devices", lambda library: tuple(found))
    assert provider.available() is None
    assert provider.device_names() == ["0", "1"]
    assert provider.devices(provider.checked_options({"device": 1})) == [found[1]]
    assert provider.provider_options(provider.checked_options({}), generating=True) == {}
    with pytest.raises(ProviderUnavailableError, match="no device 2, only 2"):
        provider.devices(provider.checked_options({"device": 2}))

    def none(library: Path) -> None:
        raise ProviderUnavailableError(f"{library} has no device on this machine")

    monkeypatch.setattr(nv_tensorrt_rtx, "plugin_devices", none)
    assert "onnxruntime_ep_nv_tensorrt_rtx/plugin.so has no device" in str(provider.available())


def test_names_of_options_follow_the_product(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    ir.save(model, tmp_path / "model.onnx")
    provider = get_provider("nv_tensorrt_rtx")
    assert isinstance(provider, TensorRTProvider)
    config = RunnerConfig(context_length=32)
    names = provider.shape_options(tmp_path / "model.onnx", config, provider.checked_options({}))
    assert set(names) == {f"nv_profile_{kind}_shapes" for kind in ("min", "opt", "max")}
    assert provider.cache_options(tmp_path) == {"nv_runtime_cache_path": str(tmp_path)}
