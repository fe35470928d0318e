from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny

from carryall.cli import carryall

_HAS_OPTIMUM = importlib.util.find_spec("optimum") is not None


@pytest.mark.skipif(_HAS_OPTIMUM, reason="Optimum is installed")
def test_without_optimum_the_error_names_the_extra(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "checkpoint")
    result = CliRunner().invoke(carryall, ["export", str(source), str(tmp_path / "out"), "--via", "optimum"])
    assert "pip install 'carryall[optimum]'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_OPTIMUM, reason="Optimum is not installed")
@pytest.mark.filterwarnings("ignore")  # torch and Optimum issue their own warnings
def test_a_traced_package_equals_the_exported_one(tmp_path: Path) -> None:
    source, traced, exported = (tmp_path / name for name in ("checkpoint", "traced", "exported"))
    write_tiny("llama", source)
    runner = CliRunner()
    for arguments in (["export", source, traced, "--via", "optimum"], ["export", source, exported]):
        assert runner.invoke(carryall, [str(argument) for argument in arguments]).exit_code == 0
    result = runner.invoke(carryall, ["verify", str(traced), str(exported), "--max-kl", "1e-9"])
    assert result.exit_code == 0, result.output
