"""Served packages of encoders: embeddings of one, ranking of another, and the kinds of folders."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_kit import write_encoder
from tiny_encoders import CLASSIFIER, write_tiny_encoder
from tiny_models import write_tiny

import carryall
from carryall.errors import RequestError, UsageError
from carryall.runtime.api.load_encoder import is_encoder_folder, load_encoder
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.encoder import EncoderHandler
from carryall.runtime.service.core.model_folder import encoder_loader, models_in


def exported(folder: Path, labels: int) -> Path:
    """Export an encoder; with labels, a classifier."""
    names = {str(number): f"label {number}" for number in range(labels)}
    changes: dict[str, Any] = {"id2label": names} if labels else {}
    source = write_tiny_encoder(
        folder / f"source{labels}", "bert", CLASSIFIER if labels else "Model", **changes
    )
    carryall.export(source, folder / "models" / f"encoder{labels}")
    return folder / "models" / f"encoder{labels}"


def test_a_classifier_with_one_label_ranks(tmp_path: Path) -> None:
    folder = exported(tmp_path, 1)
    handler = EncoderHandler("ranker", load_encoder(folder, "cpu", {}, warm_up=True))
    documents = ["a document", "another one"]
    found = asyncio.run(handler.rerank("query", documents))
    expected = carryall.TextClassifier(folder).rerank("query", documents)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(RequestError, match="'ranker' classifies texts; it has no embeddings"):
        asyncio.run(handler.embed(["x"]))


def test_a_classifier_with_several_labels_does_not_rank(tmp_path: Path) -> None:
    handler = EncoderHandler("classes", load_encoder(exported(tmp_path, 3), "cpu", {}, warm_up=False))
    with pytest.raises(RequestError, match="a model that reranks has one label; this one has 3: label 0"):
        asyncio.run(handler.rerank("query", ["a"]))
    with pytest.raises(UsageError, match="classifies texts; it has no option pooling"):
        load_encoder(exported(tmp_path / "2", 3), "cpu", {"pooling": "cls"}, warm_up=False)


def test_folders_are_recognised(tmp_path: Path) -> None:
    package, ranker = exported(tmp_path, 0), exported(tmp_path, 1)
    layout = write_encoder(tmp_path / "models/layout")
    decoder = write_tiny("llama", tmp_path / "models/decoder")
    carryall.export(decoder, tmp_path / "models/exported")
    found = models_in(tmp_path / "models", ModelConfig(model="demo"), EngineConfig())
    assert {name: loaders[0].kind for name, loaders in found.items()} == {
        **dict.fromkeys(("encoder0", "encoder1", "layout"), "encoder"),
        **dict.fromkeys(("decoder", "exported"), "llm"),
    }
    assert all(map(is_encoder_folder, (package, ranker, layout)))
    loader = encoder_loader(ModelConfig(model=package), warm_up=False)
    assert loader is not None
    assert loader.kind == "encoder"
    assert encoder_loader(ModelConfig(model=decoder), warm_up=False) is None
    assert encoder_loader(ModelConfig(model="demo"), warm_up=False) is None
