"""Execution providers by name and by plugin library; the CPU stands in for devices."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from tiny_models import write_tiny

from carryall import LLM, InferenceSession, SamplingParams
from carryall.cli import carryall
from carryall.errors import ProviderUnavailableError, UsageError
from carryall.exporter.export import export_package
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.providers.ort import plugins
from carryall.providers.targets.ep import PassThroughProvider
from carryall.runtime.models.split import first_provider, is_split

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"""
AZURE = "AzureExecutionProvider"
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library whose registration adds the CPU device."""
    devices = onnxruntime.get_ep_devices()
    registered: list[str] = []
    monkeypatch.setattr(
        onnxruntime, "register_execution_provider_library", lambda name, path: registered.append(path)
    )
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: devices if registered else [])
    monkeypatch.setattr(plugins, "_registered", {})
    (tmp_path / "plugin.so").touch()
    yield tmp_path / "plugin.so"
    assert registered == [str(tmp_path / "plugin.so")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ir.save(ir.from_onnx_text(MODEL), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_names_may_lack_their_suffix_and_are_no_splits() -> None:
    assert get_provider("ep:CPU").execution_provider == "CPUExecutionProvider"
    assert get_provider("ep:CPUExecutionProvider").execution_provider == "CPUExecutionProvider"
    assert not is_split("ep:CPU")
    assert first_provider("ep:CPU") == "ep:CPU"
    assert is_split("cpu:0-1,openvino:2-3")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ep", "ep:NAME"),
        ("ep:QNN", r"QNNExecutionProvider is not part of .*CPUExecutionProvider"),
        ("ep:/nowhere/plugin.so", "no plugin library"),
    ],
)
def test_a_provider_that_cannot_run_states_the_reason(name: str, why: str, model: Path) -> None:
    with pytest.raises(ProviderUnavailableError, match=why):
        get_provider(name).session(model)


def test_a_file_that_is_no_plugin_is_an_error(model: Path) -> None:
    for _ in range(2):
        with pytest.raises(ProviderUnavailableError, match=r"cannot load .*as a plugin library"):
            get_provider(f"ep:{model}").session(model)


# CreateStatus is the first function of OrtApi in every version.
NEWER_PLUGIN = """
#include <stddef.h>
struct base { void **(*get_api)(unsigned version); const char *(*version)(void); };
void *CreateEpFactories(const char *name, struct base *base) {
  if (base->get_api(9999)) return NULL;
  void *(*create_status)(int, const char *) = (void *(*)(int, const char *))base->get_api(1)[0];
  return create_status(1, "built for API version 9999");
}
void *ReleaseEpFactory(void *factory) { return NULL; }
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform == "win32", reason="it needs a C compiler")
def test_a_plugin_for_another_onnxruntime_says_so_each_time(tmp_path: Path, model: Path) -> None:
    library = tmp_path / "newer.so"
    (tmp_path / "newer.c").write_text(NEWER_PLUGIN)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", tmp_path / "newer.c", "-o", library], check=True)
    why = rf"onnxruntime {onnxruntime.__version__} cannot load .*version 9999.* built for this version"
    for _ in range(2):
        with pytest.raises(ProviderUnavailableError, match=why):
            get_provider(f"ep:{library}").session(model)


def test_a_plugin_without_device_names_what_is_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def register(name: str, path: str) -> None:
        if calls:
            raise RuntimeError("a library of this name is registered")
        calls.append(path)

    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", register)
    (tmp_path / "idle.so").touch()
    for _ in range(2):
        with pytest.raises(ProviderUnavailableError, match=r"has no device .*CPU \(.*CPUExecutionProvider\)"):
            PassThroughProvider(str(tmp_path / "idle.so")).session(model)


def test_a_plugin_that_the_program_registered_is_not_registered_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "own.so"
    library.touch()
    (cpu,) = onnxruntime.get_ep_devices()[:1]
    own = SimpleNamespace(ep_name=cpu.ep_name, device=cpu.device, ep_metadata={"library_path": str(library)})
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [cpu, own])
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", pytest.fail)
    assert plugins.plugin_devices(library) == (own,)


def test_a_plugin_runs_on_its_device(plugin: Path, model: Path) -> None:
    target = PassThroughProvider(str(plugin))
    assert target.available() is None
    session = target.session(model)
    assert session.get_providers() == ["CPUExecutionProvider"]
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], X + X)
    with pytest.raises(ProviderUnavailableError, match=r"has no GPU device, only CPU"):
        target.session(model, RunnerConfig(options={"device": "gpu"}))


def test_inference_session_takes_a_plugin(plugin: Path, model: Path) -> None:
    session = InferenceSession(model, providers=[f"ep:{plugin}"])
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], X + X)
    assert [share.provider for share in session.placement().shares] == ["CPUExecutionProvider"]
    with pytest.raises(UsageError, match="must be the only entry"):
        InferenceSession(model, providers=[f"ep:{plugin}", "cpu"])


@pytest.mark.parametrize("lowering", ["standard", "slots"])
def test_llm_gives_the_tokens_of_the_cpu_provider(
    lowering: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    made = export_package(write_tiny("qwen3", tmp_path / "checkpoint"), tmp_path / "package")
    params, results = SamplingParams(temperature=0, max_tokens=8), []
    for provider, options in (("cpu", {}), ("ep:CPU", {"lowering": lowering})):
        with LLM(made.path, provider=provider, max_slots=2, provider_options=options) as llm:
            results.append([result.outputs[0].token_ids for result in llm.generate(["hello", "a b"], params)])
            assert llm.fallbacks == []
    assert results[0] == results[1]


@pytest.mark.skipif(AZURE not in onnxruntime.get_available_providers(), reason="this wheel has no Azure")
def test_a_fallback_is_refused_unless_allowed_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's execution provider is available and takes no node of such models."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    made = export_package(write_tiny("llama", tmp_path / "checkpoint"), tmp_path / "package")
    with pytest.raises(ProviderUnavailableError, match=rf"cannot run on {AZURE} .*allow the fallback"):
        LLM(made.path, provider="ep:Azure", max_slots=1)
    with LLM(made.path, provider="ep:Azure", max_slots=1, allow_fallback=True) as llm:
        (placed,) = llm.fallbacks
        assert llm.generate("hello")[0].outputs[0].token_ids
    assert [share.provider for share in placed.shares] == ["CPUExecutionProvider"]
    assert any("MatMul" in reason and f"{AZURE} runs none" in reason for reason in placed.reasons)
    arguments = ["run", str(made.path), "hello", "--provider", "ep:Azure", "--max-tokens", "2"]
    assert CliRunner().invoke(carryall, arguments).exit_code == 1
    lenient = CliRunner().invoke(carryall, [*arguments, "--allow-fallback"])
    assert lenient.exit_code == 0, lenient.output
    assert "some nodes fell back:\nCPUExecutionProvider: " in lenient.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lowering": "odd"}, "one of standard, slots, not 'odd'"),
        ({"settings": "a=1;b"}, "'b', which is not NAME=VALUE"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str, model: Path) -> None:
    target = PassThroughProvider("CPU")
    config = RunnerConfig(max_slots=1, context_length=8, options=options)
    with pytest.raises(UsageError, match=why):
        target.runner(model, config)


def test_settings_reach_the_execution_provider() -> None:
    target = PassThroughProvider("QNN")
    options = target.checked_options({"settings": "backend_path=a/b.so; htp=1"})
    found = target.provider_options(options, generating=True)
    assert found == {"backend_path": "a/b.so", "htp": "1"}


def test_devices_are_described() -> None:
    kind = SimpleNamespace(name="NPU")
    device = SimpleNamespace(device=SimpleNamespace(type=kind, vendor="V"), ep_name="E")
    assert plugins.described([device]) == "NPU (V, E)"
