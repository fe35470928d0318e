"""``carryall doctor --build-kernels``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carryall.providers.native.compiler.find_compiler", lambda: None)
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels"])
    assert result.exit_code != 0
    assert "install a C++17 compiler" in result.stderr


def test_it_excludes_the_selftest() -> None:
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels", "--selftest"])
    assert result.exit_code == 2
    assert "--build-kernels excludes --selftest" in result.stderr


@pytest.mark.usefixtures("without_kernels")
def test_it_says_what_was_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("carryall.cli.verbs.doctor.build_library", lambda: tmp_path)
    result = CliRunner().invoke(carryall, ["doctor", "--build-kernels", "--json"])
    assert result.exit_code == 1  # nothing was built here
    assert json.loads(result.stdout)["path"] is None
