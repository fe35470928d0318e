"""A model is opened once: its graph is read when it is prepared, and its config.json is read once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.exporter.export import export_package
from carryall.storage import texts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often ``onnx_ir.load`` read each file."""
    found: Counter[str] = Counter()
    load = ir.load

    def counted(path: Any, *args: Any, **options: Any) -> ir.Model:
        found[str(path)] += 1
        return load(path, *args, **options)

    monkeypatch.setattr(ir, "load", counted)
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the text of each config.json was read."""
    found: Counter[str] = Counter()
    read_text = texts.read_text

    def counted(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "config.json":
            found[str(path)] += 1
        return read_text(path, *args, **options)

    monkeypatch.setattr("carryall.exporter.config.files.read_text", counted)
    return found


def generate(model: Path, **options: Any) -> None:
    with LLM(model, max_slots=2, **options) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    checkpoint = write_tiny("llama", tmp_path / "tiny")
    return export_package(checkpoint, tmp_path / "package").path


def test_a_graph_is_read_once_and_once_more_to_be_lowered(package: Path, loads: Counter[str]) -> None:
    generate(package)
    assert loads == {str(package / "model.onnx"): 2}


@pytest.mark.parametrize("file", [False, True])
def test_the_graph_of_a_cached_model_is_not_read(file: bool, package: Path, loads: Counter[str]) -> None:
    model = package / "model.onnx" if file else package
    generate(model)
    loads.clear()
    generate(model)
    assert not loads


def test_config_is_read_once(package: Path, reads: Counter[str]) -> None:
    for model in (package, package / "model.onnx"):
        for _ in range(2):
            reads.clear()
            generate(model)
            assert set(reads.values()) <= {1}
    reads.clear()
    generate(package.parent / "tiny")
    assert set(reads.values()) == {1}
