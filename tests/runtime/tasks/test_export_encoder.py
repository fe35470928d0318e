"""``export`` of encoders: packages that embed, classify and rank as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_encoders import CLASSIFIER, write_tiny_encoder

import carryall
from carryall.errors import (
    PackageError,
    PromptTooLongError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)
from carryall.exporter.package import Package
from carryall.runtime.text.tokenizer import Tokenizer


def with_modules(folder: Path, pooling: str, *, normalize: bool) -> Path:
    """Add the files of sentence-transformers."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if normalize else {})
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def states(package: Path, text: str) -> Any:
    """Hidden states of one text without padding."""
    ids = np.array([Tokenizer(package).encode(text)])
    session = carryall.InferenceSession(package / "model.onnx", providers=["cpu"])
    (found,) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return found[0].astype(np.float64)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("mean_tokens", lambda rows: rows.mean(0)),
        ("cls_token", lambda rows: rows[0]),
        ("lasttoken", lambda rows: rows[-1]),
    ],
)
def test_a_package_embeds_as_its_modules_say(tmp_path: Path, pooling: str, pool: Any) -> None:
    source = write_tiny_encoder(tmp_path / "source", "bert", type_vocab_size=1)
    with_modules(source, pooling, normalize=True)
    report = carryall.export(source, tmp_path / "out")
    assert (report.model_type, report.quantization) == ("bert", None)
    package = Package.open(tmp_path / "out")
    assert "1_Pooling/config.json" in package.record.files
    assert set(package.integrity().values()) == {""}
    texts = ["a longer text than the others", "b", "cd"]
    found = carryall.TextEncoder(tmp_path / "out").embed(texts)
    for text, vector in zip(texts, found, strict=True):
        expected = pool(states(tmp_path / "out", text))
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), rtol=0, atol=2e-6)


def test_texts_beyond_the_positions_of_the_model_are_refused_or_cut(tmp_path: Path) -> None:
    carryall.export(write_tiny_encoder(tmp_path / "source", "roberta"), tmp_path / "out")
    assert Package.open(tmp_path / "out").record.context_length == 38  # 40 rows, 2 for padding
    encoder = carryall.TextEncoder(tmp_path / "out", pooling="mean")
    assert encoder.token_counts(["x" * 100]) == [38]
    assert encoder.embed(["x" * 100], truncate=True).shape == (1, 16)
    with pytest.raises(PromptTooLongError, match="text 0 has 101 tokens; the model takes 38"):
        encoder.embed(["x" * 100])


def test_a_damaged_module_is_found(tmp_path: Path) -> None:
    source = with_modules(write_tiny_encoder(tmp_path / "source", "bert"), "cls_token", normalize=False)
    carryall.export(source, tmp_path / "out")
    (tmp_path / "out/1_Pooling/config.json").write_text("{}")
    with pytest.raises(PackageError, match=r"1_Pooling/config.json is damaged"):
        Package.open(tmp_path / "out")


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_scores_texts_and_pairs(tmp_path: Path, labels: int) -> None:
    names = {str(number): f"label {number}" for number in range(labels)}
    source = write_tiny_encoder(tmp_path / "source", "bert", CLASSIFIER, id2label=names)
    carryall.export(source, tmp_path / "out")
    classifier = carryall.TextClassifier(tmp_path / "out")
    assert classifier.labels == list(names.values())
    texts: list[Any] = ["one text", ("a query", "a document"), ("a query", "a much longer document")]
    logits: Any = classifier.logits(texts)
    scores: Any = classifier.scores(texts)
    assert logits.shape == (3, labels)
    np.testing.assert_allclose(classifier.logits(texts[::-1]), logits[::-1], rtol=0, atol=1e-5)
    powers = np.exp(logits.astype(np.float64))
    expected = powers / (1 + powers) if labels == 1 else powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
    if labels == 1:
        found = classifier.rerank("a query", ["a document", "a much longer document"])
        np.testing.assert_allclose(found, scores[1:, 0], rtol=0, atol=1e-6)
    else:
        with pytest.raises(RequestError, match="a model that reranks has one label; this one has 3: label 0"):
            classifier.rerank("a", ["b"])
    assert classifier.logits([]).shape == (0, labels)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"adapter": "adapter"}, "adapter"), ({"layout": "transformers.js"}, "layout")],
)
def test_options_of_decoders_are_refused(tmp_path: Path, options: Any, name: str) -> None:
    source = write_tiny_encoder(tmp_path / "source", "distilbert")
    with pytest.raises(UsageError, match=f"'distilbert' is a text encoder, for which export has no {name}"):
        carryall.export(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "method", "block", "error"),
    [("int8", "int8-fast", 128, 0.001), ("int4-fast", "int4-fast", 32, 0.001)],
)
def test_weights_are_quantized_as_those_of_decoders(
    tmp_path: Path, name: str, method: str, block: int, error: float
) -> None:
    source = with_modules(
        write_tiny_encoder(tmp_path / "s", "bert", type_vocab_size=1), "mean_tokens", normalize=True
    )
    report = carryall.export(source, tmp_path / "out", quantize=name)
    assert report.quantization is not None
    assert (report.quantization["method"], report.quantization["block_size"]) == (method, block)
    assert report.left_float is not None
    kept = {value.name for value in Package.open(tmp_path / "out").graph.graph.initializers.values()}
    assert "encoder.layer.0.intermediate.dense.weight.values" in kept
    texts = ["a longer text than the others", "b", "cd"]
    found = carryall.TextEncoder(tmp_path / "out").embed(texts)
    for text, vector in zip(texts, found, strict=True):  # the same weights, on activations that are floats
        expected = states(tmp_path / "out", text).mean(0)
        assert 1 - vector @ (expected / np.linalg.norm(expected)) < error


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"method": "int8-dynamic"}, "a text encoder is quantized by int4, int8 or int4-fast, int8-fast"),
        ({"method": "int4", "algorithm": "gptq"}, "without a calibration text"),
        ({"method": "int8", "budget": 6.0}, "without a calibration text"),
    ],
)
def test_recipes_that_need_a_decoder_are_refused(
    tmp_path: Path, recipe: dict[str, Any], message: str
) -> None:
    source = write_tiny_encoder(tmp_path / "source", "bert")
    with pytest.raises(UsageError, match=message):
        carryall.export(source, tmp_path / "out", quantize=carryall.QuantizationRecipe(**recipe))
    assert not (tmp_path / "out").exists()


def test_modules_that_change_vectors_are_refused(tmp_path: Path) -> None:
    source = with_modules(write_tiny_encoder(tmp_path / "source", "bert"), "cls_token", normalize=False)
    (source / "modules.json").write_text('[{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}]')
    with pytest.raises(UnsupportedModelError, match="modules LSTM are not supported"):
        carryall.export(source, tmp_path / "out")
    (source / "modules.json").write_text('[{"type": "x.Pooling", "path": "../other"}]')
    with pytest.raises(PackageError, match=r"names the folder '../other', which lies outside"):
        carryall.export(source, tmp_path / "out")


def test_a_language_model_is_not_made_of_it(tmp_path: Path) -> None:
    carryall.export(write_tiny_encoder(tmp_path / "source", "bert"), tmp_path / "out")
    for model in ("source", "out"):
        with pytest.raises(UnsupportedModelError, match="is a text encoder, which generates no text"):
            carryall.LLM(tmp_path / model)
