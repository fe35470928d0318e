"""The doctor: what it finds here, and what it says of broken installations."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import numpy as np
import pytest

from carryall.providers import doctor, ort
from carryall.providers.cpu import CpuProvider
from carryall.providers.openvino import OpenVinoProvider
from carryall.runtime.errors import ProviderRuntimeError


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
    for provider in (CpuProvider, OpenVinoProvider):
        monkeypatch.setattr(provider, "available", lambda self: "install me")
    found = doctor.diagnose()
    assert found.exit_code == 1
    assert [report.detail for report in found.providers if report.name == "cpu"] == ["install me"]


class WrongSession:
    def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
        return [np.zeros((2, 2), np.float32)]


def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuProvider, "session", lambda self, model: WrongSession())
    assert not cpu_report().works
    assert "wrong results" in cpu_report().detail


@pytest.mark.parametrize("error", [ProviderRuntimeError("device lost"), OSError("device lost")])
def test_whatever_breaks_is_reported(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def session(self: CpuProvider, model: object) -> None:
        raise error

    monkeypatch.setattr(CpuProvider, "session", session)
    report = cpu_report()
    assert not report.works
    assert "device lost" in report.detail
