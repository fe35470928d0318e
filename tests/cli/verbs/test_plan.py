"""``carryall plan``."""

from __future__ import annotations

import json
from pathlib import Path

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
    words = f"plan {tiny_package} --memory 2GB --bandwidth 1.5GB --context 64 --batch 3 --goal speed --json"
    found = json.loads(CliRunner().invoke(carryall, words.split()).stdout)
    expected = {"memory_bytes": 2 * 10**9, "bandwidth_gb_s": 1.5, "context_length": 64, "batch": 3}
    assert expected.items() <= found.items()
    assert found["choice"] == "int4-fast"


def test_a_wrong_unit_is_one_line(tiny_package: Path) -> None:
    result = CliRunner().invoke(carryall, ["plan", str(tiny_package), "--bandwidth", "10 parsecs"])
    assert result.exit_code == 2
    assert "is not a valid size a second" in result.output
