"""``carryall doctor --provider P --selftest``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall


@pytest.mark.long
def test_a_provider_proves_itself() -> None:
    result = CliRunner().invoke(
        carryall, ["doctor", "--provider", "cpu", "--selftest", "--selftest-limit", "0", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["provider"], report["agreement"], report["passed"]) == ("cpu", 1.0, True)
    text = CliRunner().invoke(carryall, ["doctor", "--provider", "null", "--selftest"])
    assert "passed" in text.stdout
    assert "tokens/s" in text.stdout


def test_a_device_goes_to_the_provider() -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--provider", "cpu", "--device", "1", "--selftest"])
    assert result.exit_code != 0
    assert "provider 'cpu' has no devices to choose from; omit '1'" in result.output


def test_a_provider_that_cannot_run_says_why() -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--provider", "tensorrt", "--selftest"])
    assert result.exit_code != 0
    assert "TensorrtExecutionProvider is not part of" in result.output


def test_a_report_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["doctor", "--provider", "null", "--selftest", "--selftest-report", str(path)]
    result = CliRunner().invoke(carryall, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["provider"] == "null"
    lonely = CliRunner().invoke(carryall, ["doctor", "--selftest-report", str(path)])
    assert lonely.exit_code != 0
    assert "--selftest-report needs --selftest" in lonely.output
