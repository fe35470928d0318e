"""The doctor: its findings on this machine and on broken installations."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carryall.errors import ProviderRuntimeError
from carryall.providers.host import doctor
from carryall.providers.ort import ort
from carryall.providers.targets.cpu import CpuProvider
from carryall.providers.targets.openvino import OpenVinoProvider
from carryall.providers.targets.webgpu import WebGpuProvider


@pytest.fixture(autouse=True)
def _quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bandwidth", lambda: 10.0)


def cpu_report() -> doctor.ProviderReport:
    return next(report for report in doctor.diagnose().providers if report.name == "cpu")


def test_a_sound_installation() -> None:
    steps: list[str] = []
    found = doctor.diagnose(steps.append)
    assert found.exit_code == 0
    assert "provider cpu" in steps
    reports = {report.name: report for report in found.providers}
    assert reports["cpu"].works
    assert reports["cpu"].milliseconds is not None
    assert not reports["null"].counts
    assert found.packages["onnxruntime"] == importlib.metadata.version("onnxruntime")
    assert "pytest" not in found.packages
    assert json.loads(json.dumps(found.to_dict()))["machine"]["usable_cores"] >= 1


def test_doubled_wheels_are_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "installed_wheels", lambda: {"onnxruntime": "1", "onnxruntime-gpu": "1"})
    found = doctor.diagnose()
    assert found.exit_code == 1
    assert found.wheel_conflict is not None
    assert "pip uninstall" in found.wheel_conflict


def test_no_working_provider_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in (CpuProvider, OpenVinoProvider, WebGpuProvider):
        monkeypatch.setattr(provider, "available", lambda self: "install me")
    found = doctor.diagnose()
    assert found.exit_code == 1
    assert [report.detail for report in found.providers if report.name == "cpu"] == ["install me"]


class WrongSession:
    def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
        return [np.zeros((2, 2), np.float32)]


@pytest.mark.long
def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProvider, "session", lambda self, model: WrongSession())
    assert not cpu_report().works
    assert "the results are wrong" in cpu_report().detail


@pytest.mark.parametrize("error", [ProviderRuntimeError("device lost"), OSError("device lost")])
def test_unexpected_errors_are_reported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def session(self: CpuProvider, model: object) -> None:
        raise error

    monkeypatch.setattr(CpuProvider, "session", session)
    report = cpu_report()
    assert not report.works
    assert "device lost" in report.detail


def test_adapters_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProvider, "device_descriptions", lambda self: ["0 (Maker, software)"])
    assert cpu_report().devices == ("0 (Maker, software)",)


def test_next_steps_concern_present_devices_only() -> None:
    cpu = doctor.ProviderReport("cpu", works=True, detail="a tiny model runs")
    cuda = doctor.ProviderReport("cuda", works=False, detail="install carryall[cuda]")
    openvino = doctor.ProviderReport("openvino", works=False, detail="install carryall[openvino]")
    reports = [cpu, cuda, openvino]
    assert doctor.next_steps(reports, [], None) == []
    assert doctor.next_steps(reports, ["NVIDIA GPU (10de:2335)", "AMD GPU (1002:1)"], None) == [
        "cuda, for NVIDIA GPU (10de:2335): install carryall[cuda]"
    ]
    assert doctor.next_steps(reports, ["Intel GPU (8086:1)"], "two wheels") == ["two wheels"]
    broken = doctor.ProviderReport("cpu", works=False, detail="install carryall[cpu]")
    assert doctor.next_steps([broken, cuda], [], None) == ["cpu: install carryall[cpu]"]


def test_accelerators_are_read_off_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PCI", tmp_path)
    devices = {"0": ("0x030200", "0x10de", "0x2335"), "1": ("0x120000", "0x8086", "0x7d1d")}
    others = {"2": ("0x020000", "0x8086", "0x1572"), "3": ("0x030000", "0x1234", "0x1111")}
    for name, facts in (devices | others).items():
        (tmp_path / name).mkdir()
        for file, content in zip(("class", "vendor", "device"), facts, strict=True):
            (tmp_path / name / file).write_text(f"{content}\n")
    (tmp_path / "4").mkdir()
    assert doctor.accelerators() == ["NVIDIA GPU (10de:2335)", "Intel accelerator (8086:7d1d)"]


def test_the_cache_and_devices_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(CpuProvider, "device_names", lambda self: ["all"])
    monkeypatch.setattr(OpenVinoProvider, "available", lambda self: "it would keep what it compiles there")
    assert doctor.diagnose().cache.size == 0
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_bytes(bytes(100))
    found = doctor.diagnose()
    assert (found.cache.size, found.cache.folder) == (100, str(tmp_path / "new"))
    assert found.cache.free > 0
    assert cpu_report().devices == ("all",)
