"""Encoders in the folders of Optimum, transformers.js and fastembed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from sentence_models import TEXTS, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder

import carryall
from carryall.cli.group import carryall as command
from carryall.errors import ModelNotFoundError, PackageError, PromptTooLongError, UsageError
from carryall.runtime.api.load_encoder import encoder_folder, is_encoder_folder, load_encoder
from carryall.runtime.models.config import ModelConfig
from carryall.runtime.service.core.model_folder import encoder_loader

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
LAYOUTS = {
    "optimum": "model.onnx",
    "transformers.js": "onnx/model_quantized.onnx",
    "fastembed": "model_optimized.onnx",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    carryall.export(write_sentence_model(folder / "source", "cls"), folder / "package")
    return folder / "package"


def foreign(package: Path, folder: Path, *files: str) -> Path:
    """The tokenizer, the configuration and the graph of a package, and none of its other files."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package / name, folder / name)
    graph = onnx.load(package / "model.onnx")
    del graph.metadata_props[:]
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        onnx.save(graph, folder / file)
    return folder


def printed(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == code, result.output
    return result.stderr if code else [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_opened(package: Path, tmp_path: Path, layout: str) -> None:
    folder = foreign(package, tmp_path / "model", LAYOUTS[layout])
    expected = carryall.TextEncoder(package, truncate=True).embed(TEXTS, prompt="")
    assert is_encoder_folder(folder)
    with pytest.raises(UsageError, match=r"does not say how to pool; give pooling as cls, mean, .*--pooling"):
        carryall.TextEncoder(folder)
    encoder = carryall.TextEncoder(folder, pooling="cls", normalize=True)
    np.testing.assert_allclose(encoder.embed(TEXTS), expected, **CLOSE)
    options = ("--pooling", "cls", "--normalize")
    np.testing.assert_allclose(printed("embed", str(folder), *TEXTS, *options), expected, **CLOSE)
    file = str(folder / LAYOUTS[layout])
    np.testing.assert_allclose(printed("embed", file, *TEXTS, *options), expected, **CLOSE)
    (ranks,) = printed("rerank", file, TEXTS[1], *TEXTS, *options, "--json")
    assert ranks[0]["index"] == 1


def test_serve_reads_the_options_of_the_folder(package: Path, tmp_path: Path) -> None:
    folder = foreign(package, tmp_path / "model", "onnx/model.onnx")
    (folder / "config.toml").write_text('[encoder]\npooling = "cls"\nnormalize = true\n')
    loader = encoder_loader(ModelConfig(model=folder), warm_up=True)
    assert loader is not None
    expected = carryall.TextEncoder(package).embed(TEXTS)
    np.testing.assert_allclose(loader.load().embed(TEXTS), expected, **CLOSE)
    (folder / "config.toml").write_text('[encoder]\npool = "cls"\n')
    with pytest.raises(UsageError, match="pool"):
        encoder_loader(ModelConfig(model=folder), warm_up=False)


def test_one_of_several_files_is_named(package: Path, tmp_path: Path) -> None:
    files = ("onnx/model_int8.onnx", "onnx/model_q4.onnx")
    folder = foreign(package, tmp_path / "model", *files)
    message = "has several ONNX files: onnx/model_int8.onnx, onnx/model_q4.onnx; name one, such as "
    with pytest.raises(ModelNotFoundError, match=message):
        carryall.TextEncoder(folder, pooling="cls")
    assert "name one, such as" in printed("embed", str(folder), "x", code=2)
    for file in files:
        encoder = carryall.TextEncoder(folder / file, pooling="cls", normalize=True)
        np.testing.assert_allclose(encoder.embed(TEXTS), carryall.TextEncoder(package).embed(TEXTS), **CLOSE)


def test_a_classifier_of_optimum_classifies(tmp_path: Path) -> None:
    labels: dict[str, Any] = {"id2label": {"0": "no", "1": "yes"}}
    source = write_tiny_encoder(tmp_path / "source", "bert", CLASSIFIER, **labels)
    carryall.export(source, tmp_path / "package")
    folder = foreign(tmp_path / "package", tmp_path / "model", "model.onnx")
    assert encoder_folder(folder) == folder
    classifier: Any = load_encoder(folder, "cpu", {}, warm_up=True)
    assert classifier.labels == ["no", "yes"]
    expected = carryall.TextClassifier(tmp_path / "package").scores(TEXTS)
    np.testing.assert_allclose(classifier.scores(TEXTS), expected, **CLOSE)


@pytest.mark.parametrize(
    ("stated", "most"), [({"model_max_length": 20}, 20), ({"model_max_length": 10**30}, 40), ({}, 40)]
)
def test_the_longest_text_is_that_of_the_tokenizer_or_the_model(
    package: Path, tmp_path: Path, stated: dict[str, int], most: int
) -> None:
    """A graph of others says nothing of it; beyond its positions it would fail while it runs."""
    folder = foreign(package, tmp_path / "model", "model.onnx")
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    encoder = carryall.TextEncoder(folder, pooling="cls")
    assert encoder.max_tokens == most
    with pytest.raises(PromptTooLongError, match=f"the model takes {most}"):
        encoder.embed(["x" * 60])


def test_a_tokenizer_of_another_model_is_named(package: Path, tmp_path: Path) -> None:
    """The text has a token of which the model has no embedding."""
    folder = foreign(package, tmp_path / "model", "model.onnx")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["z"] = 302
    (folder / "tokenizer.json").write_text(json.dumps(content))
    encoder = carryall.TextEncoder(folder, pooling="cls")
    assert len(encoder.embed(["x"])) == 1
    message = "text 1 has the token 302, but the model has embeddings of 258 tokens: .* of another model"
    with pytest.raises(PackageError, match=message):
        encoder.embed(["x", "z"])
