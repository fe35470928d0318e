"""The self-test of a provider: its order, its time limit, and a file that survives the end of the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_stand_ins import STAND_INS

from carryall.contract import PIXELS
from carryall.errors import ProviderUnavailableError
from carryall.providers import get_provider
from carryall.providers.host import selftest
from carryall.providers.host.selftest import SelftestReport
from carryall.providers.host.selftest_checks import Check, checked
from carryall.runtime.tasks import selftest as tasks
from carryall.runtime.tasks import selftest_models as models


@pytest.fixture(autouse=True)
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the demo model passes at once."""

    def passes(provider: Any, reference: Any, *_: object, **__: object) -> SelftestReport:
        return SelftestReport(provider.name, reference.name, 24, 1.0, 0.0, 0.1, 0.1, 1.0, 1.0)

    monkeypatch.setattr(selftest, "selftest", passes)


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checks that measure nothing; the list has those that ran."""
    ran: list[str] = []

    def passes(area: Any, name: str, measure: object) -> Check:
        ran.append(f"{area}: {name}")
        return Check(area=area, name=name, status="passed")

    monkeypatch.setattr(tasks, "checked", passes)
    return ran


def test_without_time_only_the_demo_model_runs(instant: list[str], tmp_path: Path) -> None:
    report = tasks.selftest_provider("cpu", time_limit=0, report=tmp_path / "r.json")
    assert report.passed
    assert not instant
    assert {check.status for check in report.checks} == {"skipped"}
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["passed"] is True
    assert written["provider"] == "cpu"
    assert written["running"] is None
    assert len(written["checks"]) == len(report.checks) > 88
    assert written["machine"]["logical_cores"] >= 1
    assert "onnxruntime" in written["packages"]


def test_families_forms_options_and_speed_are_checked(instant: list[str]) -> None:
    told: list[str] = []
    report = tasks.selftest_provider("cpu", on_check=told.append)
    assert report.passed
    assert told == instant
    assert len({name for name in instant if name.startswith("values")}) == 97
    assert "values: smolvlm tower" in instant
    options = {name for name in instant if name.startswith("options")}
    assert {"options: kv_memory=paged", "options: kernels=onnxruntime", "options: spinning=false"} <= options
    assert {"speed: float", "speed: int4", "speed: int4 spinning=false"} <= set(instant)
    # What each family and each form needs is known before the rest, because time may end.
    assert all(name.startswith("values") for name in instant[:11])
    assert instant.index("speed: float") < 40


def test_the_file_names_the_check_in_which_a_process_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ends(area: Any, name: str, measure: object) -> Check:
        if name == "qwen2 int4-minima":
            raise KeyboardInterrupt
        return Check(area=area, name=name, status="failed", figures={"difference": float("inf")})

    monkeypatch.setattr(tasks, "checked", ends)
    with pytest.raises(KeyboardInterrupt):
        tasks.selftest_provider("cpu", report=tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["running"] == "values: qwen2 int4-minima"
    assert [check["name"] for check in written["checks"]] == ["llama float", "mistral int4"]
    assert written["checks"][0]["figures"] == {"difference": None}
    assert written["passed"] is False


def test_a_test_double_has_no_checks(instant: list[str]) -> None:
    assert tasks.selftest_provider("null").checks == ()
    assert not instant


def test_a_missing_provider_says_why(tmp_path: Path) -> None:
    with pytest.raises(ProviderUnavailableError, match="TensorrtExecutionProvider is not part of"):
        tasks.selftest_provider("tensorrt", report=tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_a_real_check_compares_with_the_cpu() -> None:
    plan = tasks._Plan(get_provider("cpu"), {"kv_memory": "explicit"})
    area, name, measure = next(iter(plan))
    passed, figures = measure()
    assert (area, name, passed) == ("values", "llama float", True)
    assert figures["difference"] < 1e-5
    assert figures["tolerance"] == 0.01


@pytest.mark.long
@pytest.mark.parametrize("name", ["cpu", "openvino", "cuda-on-cpu", "webgpu-on-cpu", "tensorrt-on-cpu"])
def test_a_tower_is_compared_with_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = STAND_INS[name]() if name in STAND_INS else get_provider(name)
    if provider.available() is not None:
        pytest.skip(str(provider.available()))
    measure = tasks._Plan(provider, {})._tower
    passed, figures = measure()
    assert passed
    assert figures["difference"] < 1e-5
    feeds = models.pictures()
    feeds[PIXELS] = feeds[PIXELS][::-1].copy()
    monkeypatch.setattr(models, "pictures", lambda: feeds)
    passed, figures = measure()
    assert not passed
    assert figures["difference"] > 10 * figures["tolerance"]


def test_a_tower_is_refused_with_the_reason_where_attention_has_no_kernel() -> None:
    check = checked("values", "smolvlm tower", tasks._Plan(STAND_INS["directml-on-cpu"](), {})._tower)
    assert check.status == "refused"
    assert "opset 21 does not have this operator" in check.detail


def test_carryalls_kernels_are_not_compared_with_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def logits_of(provider: Any, make: object, context: int, options: Any) -> Any:
        opened.append((provider.name, options.get("kernels", "auto")))
        return np.ones((1, 8), np.float32)

    monkeypatch.setattr(tasks, "logits_of", logits_of)
    tasks._reference.cache_clear()
    _, _, measure = next(iter(tasks._Plan(get_provider("cpu"), {})))
    measure()
    tasks._reference.cache_clear()
    assert opened == [("cpu", "auto"), ("cpu", "onnxruntime")]


@pytest.mark.parametrize(
    ("family", "form", "bar"),
    [
        ("llama", "int4", 0.06),
        ("llama", "float", 0.01),
        ("qwen3_moe", "float", 0.25),
        ("mixtral", "int4", 0.25),
    ],
)
def test_mixtures_may_choose_other_experts(family: str, form: str, bar: float) -> None:
    assert tasks.tolerance(family, form) == bar
