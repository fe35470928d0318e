"""Installed distributions as importlib.metadata finds them."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from carryall.storage.distributions import distribution_folder, distribution_version


@pytest.mark.parametrize("name", ["numpy", "onnx_ir", "ml-dtypes", "ML_Dtypes", "pytest"])
def test_installed_ones_have_the_versions_of_importlib(name: str) -> None:
    folder = distribution_folder(name)
    assert folder is not None
    assert distribution_version(folder) == importlib.metadata.version(name)


def test_the_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        (tmp_path / str(number) / f"some_thing-{number}.0+cpu.dist-info").mkdir(parents=True)
    (tmp_path / "2" / "thing-3.0.dist-info").mkdir()
    missing = tmp_path / "missing"
    monkeypatch.setattr(sys, "path", [str(missing), str(tmp_path / "2"), str(tmp_path / "1")])
    folder = distribution_folder("Some.Thing")
    assert folder == tmp_path / "2" / "some_thing-2.0+cpu.dist-info"
    assert distribution_version(folder) == "2.0+cpu"
    assert distribution_folder("some") is None
