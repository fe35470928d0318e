"""The benchmark of speculation makes a head right as often as it is told to, and refuses what is no head."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_sessions import write_hybrid

ENGINE = Path(__file__).resolve().parents[2] / "benchmarks" / "engine"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ENGINE))  # where Python finds the modules beside a script
    yield importlib.import_module("speculation")
    sys.path.remove(str(ENGINE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "checkpoint")


def measured(
    script: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> dict[str, Any]:
    short = [
        "--kind",
        "copy",
        "--rounds",
        "1",
        "--new-tokens",
        "12",
        "--threads",
        "1",
        "--cpu-time",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["speculation.py", "--model", str(model), *short, *options])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "differ" in line]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.long
@pytest.mark.parametrize(("rate", "bounds"), [("1", (1.0, 1.0)), ("0.5", (0.2, 0.8)), ("0", (0.0, 0.0))])
def test_a_head_is_right_so_often(
    rate: str,
    bounds: tuple[float, float],
    script: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--method", "mtp", "--always", "--tokens", "1", "--acceptance", rate]
    result = measured(script, model, monkeypatch, capsys, *options)
    assert bounds[0] <= result["acceptance_rate"] <= bounds[1]
    assert result["ratio"] == pytest.approx(result["speculative"] / result["plain"], rel=0.05)
    assert (result["tokens_per_step"] > 1.5) == (rate == "1")


@pytest.mark.long
def test_each_batch_has_a_row(
    script: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(script, model, monkeypatch, capsys, "--method", "prompt-lookup", "--batch", "1,3")
    assert (result["kind"], result["batch"]) == ("copy", 3)


def test_an_acceptance_needs_a_head(
    script: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="needs a head that reads hidden states, such as mtp"):
        measured(script, model, monkeypatch, capsys, "--method", "prompt-lookup", "--acceptance", "0.5")
