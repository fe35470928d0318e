"""The soak script: what it calls growth, and a short run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "soak.py"


def module() -> Any:
    spec = importlib.util.spec_from_file_location("soak", PATH)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = made
    spec.loader.exec_module(made)
    return made


def samples(mib: Any, files: Any) -> list[dict[str, float]]:
    return [{"mib": mib(n), "threads": 5, "files": files(n)} for n in range(100)]


def test_growth_is_found_after_the_warm_up() -> None:
    faults = module().faults
    assert faults(samples(lambda n: 300 + min(n, 15) * 10, lambda n: 20), 32) == []
    (memory,) = faults(samples(lambda n: 300 + n, lambda n: 20), 32)
    assert "mib grew from 32" in memory
    (files,) = faults(samples(lambda n: 300, lambda n: 20 + n), 32)
    assert "files grew" in files
    assert faults(samples(lambda n: 300, lambda n: 20)[:1], 32) == ["the run was too short for 2 samples"]


def test_errors_of_the_server_and_many_broken_connections_are_found() -> None:
    wrong = module().wrong_answers
    assert wrong({"200": 2000, "400": 10, "ReadError": 2, "vanished": 3}) == []
    assert wrong({"200": 2000, "500": 1}) == ["1 answers with status 500"]
    assert wrong({"200": 2000, "ReadError": 2, "ConnectError": 1}) == [
        "broken connections: {'ReadError': 2, 'ConnectError': 1}"
    ]


@pytest.mark.slow
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    soak = module()
    soak.SAMPLE_SECONDS = 2.0
    assert soak.main(["--minutes", "0.4", "--streams", "4", "--most-mib", "200"]) == 0
    assert '"faults": []' in capsys.readouterr().out
