"""``carryall doctor --build-kernels``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.providers.host.tuning import Tuning


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carryall.providers.native.compiler.find_compiler", lambda: None)
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels"])
    assert result.exit_code != 0
    assert "install a C++17 compiler" in result.stderr


def test_it_excludes_the_selftest() -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels", "--selftest"])
    assert result.exit_code == 2
    assert "--build-kernels excludes --selftest" in result.stderr


@pytest.mark.parametrize("other", ["--build-kernels", "--selftest"])
def test_autotune_excludes_others(other: str) -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--autotune", other])
    assert result.exit_code == 2
    assert f"--autotune excludes {other}" in result.stderr


@pytest.mark.usefixtures("without_kernels")
def test_autotune_needs_the_kernels() -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--autotune"])
    assert result.exit_code == 1
    assert "the CPU kernels are not built" in result.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_autotune_says_what_is_the_fastest(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Tuning("avx2", 3, {"amx": [1.0, 1.0], "avx2": [1.5, 1.25]}, {2: [1.0, 1.0], 3: [1.25, 1.5]})
    monkeypatch.setattr("carryall.providers.targets.cpu.CpuProvider.autotune", lambda self: found)
    result = CliRunner().invoke(carryall, ["doctor", "--autotune", *(["--json"] if form == "json" else [])])
    assert result.exit_code == 0
    if form == "json":
        assert json.loads(result.stdout)["isa"] == "avx2"
    else:
        assert "avx2 of amx 100% and 100%, avx2 150% and 125%; 3 threads of 2 100%" in result.stdout


@pytest.mark.usefixtures("without_kernels")
def test_it_says_what_was_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("carryall.cli.verbs.doctor.build_library", lambda: tmp_path)
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels", "--json"])
    assert result.exit_code == 1  # nothing was built here
    assert json.loads(result.stdout)["path"] is None
