"""Checkpoints of encoders are prepared in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_models import TEXTS, write_classifier, write_sentence_model
from tiny_models import write_tiny

import carryall
from carryall.errors import CarryallError
from carryall.runtime.api.load_encoder import encoder_folder, load_encoder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_checkpoint_has_the_vectors_of_its_package(tmp_path: Path, cache: Path) -> None:
    source = write_sentence_model(tmp_path / "source", "cls")
    carryall.export(source, tmp_path / "package")
    expected = carryall.TextEncoder(tmp_path / "package").embed(TEXTS)
    np.testing.assert_array_equal(carryall.TextEncoder(source).embed(TEXTS), expected)
    prepared = [path.name for path in (cache / "packages").iterdir() if path.is_dir()]
    np.testing.assert_array_equal(carryall.TextEncoder(source).embed(TEXTS), expected)
    assert [path.name for path in (cache / "packages").iterdir() if path.is_dir()] == prepared
    assert not list(source.rglob("*.onnx"))


def test_a_changed_module_is_prepared_anew(tmp_path: Path) -> None:
    source = write_sentence_model(tmp_path / "source", "cls")
    first = carryall.TextEncoder(source).embed(TEXTS)
    modules = json.loads((source / "modules.json").read_text())
    pooling = next(module["path"] for module in modules if module["type"].endswith("Pooling"))
    file = source / pooling / "config.json"
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **modes}))
    assert np.abs(carryall.TextEncoder(source).embed(TEXTS) - first).max() > 1e-3


def test_checkpoints_of_encoders_are_told_from_those_of_decoders(tmp_path: Path) -> None:
    names = write_classifier(tmp_path / "names", "names")
    assert encoder_folder(names) == names
    assert isinstance(load_encoder(names, "cpu", {}, warm_up=True), carryall.TokenClassifier)
    decoder = write_tiny("qwen3", tmp_path / "decoder")
    carryall.export(decoder, tmp_path / "package")
    for folder in (decoder, tmp_path / "package"):
        with pytest.raises(CarryallError, match=r"decoder.* carryall\.LLM\.embed"):
            carryall.TextEncoder(folder)
    (decoder / "modules.json").write_text("[]")  # as Qwen3-Embedding has
    assert encoder_folder(decoder) is None
