"""Fixtures of several verbs: a separate cache, tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_package


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared models go into a folder of this test run."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two small layers with random weights and a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny("llama", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_package(tiny_checkpoint: Path) -> Path:
    """Return the checkpoint, exported."""
    return export_package(tiny_checkpoint, tiny_checkpoint.with_name("package")).path
