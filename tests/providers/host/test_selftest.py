"""The self-test: every provider that runs here passes it, and a provider with wrong results fails it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from device_stand_ins import STAND_INS
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.providers import get_provider
from carryall.providers.base import Provider, Runner, RunnerConfig
from carryall.providers.host.selftest import SelftestReport, selftest
from carryall.providers.targets.cpu import CpuProvider

PROMPT = [5, 100, 17, 3, 200, 42, 9, 77]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("selftest"), head_dim=16)


def result(provider: Provider, checkpoint: Path) -> SelftestReport:
    return selftest(provider, get_provider("cpu"), lambda: export_model(checkpoint), PROMPT, new_tokens=8)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cpu", "openvino", *STAND_INS])
def test_available_providers_pass(name: str, checkpoint: Path) -> None:
    provider = STAND_INS[name]() if name in STAND_INS else get_provider(name)
    reason = provider.available()
    if reason is not None:
        pytest.skip(reason)
    report = result(provider, checkpoint)
    assert report.passed
    assert (report.provider, report.reference, report.tokens) == (name, "cpu", 8)
    assert report.agreement == 1
    assert report.worst < 1e-3
    assert min(report.load_seconds, report.prompt_tokens_per_second, report.decode_tokens_per_second) > 0
    assert report.to_dict()["passed"] is True


def test_a_stand_in_is_compared_with_itself(checkpoint: Path) -> None:
    report = result(get_provider("null"), checkpoint)
    assert (report.reference, report.worst, report.passed) == ("null", 0, True)


class Wrong(CpuProvider):
    """A runner that ignores the rope: its results are finite, plausible and wrong."""

    name = "wrong"

    def runner(self, model: Path, config: RunnerConfig) -> Runner:
        content = ir.load(model)
        for name, value in content.graph.initializers.items():
            if name.endswith("_table") and value.const_value is not None:
                value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=name)
        ir.save(content, model.with_name("wrong.onnx"), external_data="wrong.onnx.data")
        return super().runner(model.with_name("wrong.onnx"), config)


def test_wrong_results_do_not_pass(checkpoint: Path) -> None:
    report = result(Wrong(), checkpoint)
    assert not report.passed
    assert report.worst > 0.05
