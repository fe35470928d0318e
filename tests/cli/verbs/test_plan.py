"""``carryall plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall


def test_it_prints_a_table_and_a_command(tiny_package: Path) -> None:
    result = CliRunner().invoke(carryall, ["plan", str(tiny_package), "--bandwidth", "10GB/s", "-q"])
    assert result.exit_code == 0, result.output
    lines = {line.partition(":")[0]: line for line in result.output.splitlines()}
    assert {"model", "machine", "as stored", "int8-fast", "int4-fast", "choice", "run"} == set(lines)
    assert "10.0 GB/s" in lines["machine"]
    assert lines["run"].endswith(f"carryall run {tiny_package} --quantize int8-fast")


def test_options_have_units(tiny_package: Path) -> None:
    words = f"plan {tiny_package} --memory 2GiB --bandwidth 1.5GB --context 64 --batch 3 --goal speed --json"
    found = json.loads(CliRunner().invoke(carryall, words.split()).stdout)
    expected = {"memory_bytes": 2 << 30, "bandwidth_gb_s": 1.5, "context_length": 64, "batch": 3}
    assert expected.items() <= found.items()
    assert found["choice"] == "int4-fast"


def test_a_wrong_unit_is_one_line(tiny_package: Path) -> None:
    result = CliRunner().invoke(carryall, ["plan", str(tiny_package), "--bandwidth", "10 parsecs"])
    assert result.exit_code == 2
    assert "is not a valid size a second" in result.output


@pytest.mark.parametrize("text", ["0", "0k"])
def test_a_context_without_tokens_is_refused(text: str, tiny_package: Path) -> None:
    result = CliRunner().invoke(carryall, ["plan", str(tiny_package), "--context", text])
    assert result.exit_code == 2
    assert "context_length 0 is not in [1, 128]" in result.output


@pytest.mark.long
def test_a_context_may_count_in_k() -> None:
    result = CliRunner().invoke(carryall, ["plan", "demo", "--context", "1k", "--json"])
    assert json.loads(result.stdout)["context_length"] == 1024
