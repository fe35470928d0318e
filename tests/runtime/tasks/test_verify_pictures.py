"""``carryall.verify`` of packages that see compares both graphs of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny
from tiny_vlms import write_vlm

import carryall
from carryall.errors import UsageError, VerificationError
from carryall.runtime.tasks.export import export

FAMILIES = ["smolvlm", "qwen2_5_vl", "llava_next", "gemma3"]
WEIGHT = "model.vision_model.encoder.layers.0.mlp.fc1.weight"


def packed(
    folder: Path, model_type: str = "smolvlm", *, change: float = 0.0, edge: int | None = None
) -> Path:
    """Export a tiny checkpoint, with a changed weight of its tower or with pictures of another size."""
    checkpoint = write_vlm(folder / "checkpoint", model_type)
    if change:
        weights = load_file(checkpoint / "model.safetensors")
        weights[WEIGHT][0, 0] += change
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    if edge:
        path = checkpoint / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "size": {"longest_edge": edge}}))
    export(checkpoint, folder / "package")
    return folder / "package"


@pytest.mark.long
@pytest.mark.parametrize("model_type", FAMILIES)
def test_equal_towers_are_run_on_pictures(tmp_path: Path, model_type: str) -> None:
    package = packed(tmp_path, model_type)
    same = carryall.verify(package, package, steps=2)
    assert same.passed
    assert same.tower is not None
    assert same.tower.outputs["image_states"].max_abs == 0
    assert "pixels" in same.tower.inputs[0]
    assert same.to_dict()["tower"]["passed"]


@pytest.mark.long
def test_a_changed_tower_fails(tmp_path: Path) -> None:
    packages = packed(tmp_path / "a"), packed(tmp_path / "b", change=1.0)
    report = carryall.verify(*packages, steps=2)
    assert report.found.passed
    assert not report.passed
    assert report.to_dict()["passed"] is False
    assert report.reason is not None
    assert "image_states" in report.reason
    assert "vision.onnx" in str(report)
    with pytest.raises(VerificationError, match="image_states"):
        report.check()


@pytest.mark.long
def test_packages_that_prepare_pictures_differently_are_not_compared(tmp_path: Path) -> None:
    packages = packed(tmp_path / "a"), packed(tmp_path / "b", edge=64)
    with pytest.raises(UsageError, match="prepare pictures differently"):
        carryall.verify(*packages, steps=2)


@pytest.mark.long
def test_a_model_of_text_has_no_tower_to_compare(tmp_path: Path) -> None:
    export(write_tiny("llama", tmp_path / "checkpoint"), tmp_path / "package")
    report = carryall.verify(tmp_path / "package", tmp_path / "package", steps=2)
    assert report.tower is None
    assert "tower" not in report.to_dict()
