"""Classes of texts and tokens against the pipelines of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_models import TEXTS, write_classifier

import carryall
from carryall.errors import PromptTooLongError, RequestError, UnsupportedModelError
from carryall.runtime.api.token_classifier import TokenClassifier

GOLDEN: dict[str, Any] = json.loads((Path(__file__).with_name("golden") / "classes.json").read_text())


def exported(tmp_path: Path, name: str) -> Path:
    carryall.export(write_classifier(tmp_path / "source", name), tmp_path / "out")
    return tmp_path / "out"


def test_entities_are_those_of_transformers(tmp_path: Path) -> None:
    finder = TokenClassifier(exported(tmp_path, "names"))
    assert finder.labels == ["O", "B-PER", "I-PER", "LOC"]
    for way in ("none", "simple", "first", "average", "max"):
        for text, parts, expected in zip(
            TEXTS, finder.entities(TEXTS, aggregation=way), GOLDEN[way], strict=True
        ):
            places = [(part.label, part.start, part.end) for part in parts]
            assert places == [(each["label"], each["start"], each["end"]) for each in expected], way
            assert [part.text for part in parts] == [text[part.start : part.end] for part in parts]
            np.testing.assert_allclose(
                [part.score for part in parts], [each["score"] for each in expected], rtol=0, atol=1e-5
            )
    rows = finder.scores(TEXTS)
    assert [len(row) for row in rows] == finder.token_counts(TEXTS)
    np.testing.assert_allclose(np.concatenate(rows).sum(1), 1, rtol=0, atol=1e-6)


def test_words_of_wordpiece_are_labelled_whole(tmp_path: Path) -> None:
    """A tokenizer that marks the tokens inside words, as BERT's does, tells the words itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = exported(tmp_path, "names")
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "Ann": 66, "##a": 65, ",": 3, "x": 4}))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.save(str(folder / "tokenizer.json"))
    finder = TokenClassifier(folder)
    parts = finder.entities(["Anna,x"], aggregation="first")[0]
    assert all(part.text in ("Anna", ",", "x", "Anna,", ",x", "Anna,x") for part in parts)
    assert [part.text for part in finder.entities(["Anna,x"], aggregation="none")[0]] != []


def test_labels_of_a_request_are_scored_by_inference(tmp_path: Path) -> None:
    classifier = carryall.TextClassifier(exported(tmp_path, "inference"))
    for key, independent in (("exclusive", False), ("independent", True)):
        scores = classifier.zero_shot(TEXTS, ["sport", "art"], hypothesis="is {}", independent=independent)
        expected = [[each["sport"], each["art"]] for each in GOLDEN[key]]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="a list of at least one label"):
        classifier.zero_shot(TEXTS, [])
    with pytest.raises(RequestError, match=r"has \{\} in place of the label"):
        classifier.zero_shot(TEXTS, ["a"], hypothesis="is it?")
    with pytest.raises(PromptTooLongError, match="text 0 has 41 tokens; the model takes 40"):
        classifier.logits(["x" * 40])
    assert classifier.logits(["x" * 40], truncate=True).shape == (1, 3)


def test_probabilities_of_texts_and_pairs(tmp_path: Path) -> None:
    classifier = carryall.TextClassifier(exported(tmp_path, "inference"))
    answers = [*GOLDEN["texts"], GOLDEN["pair"]]
    for row, answer in zip(classifier.scores([*TEXTS, (TEXTS[0], TEXTS[1])]), answers, strict=True):
        expected = {each["label"]: each["score"] for each in answer}
        np.testing.assert_allclose(row, [expected[label] for label in classifier.labels], rtol=0, atol=1e-5)


def test_a_model_is_used_for_its_task(tmp_path: Path) -> None:
    names = exported(tmp_path, "names")
    with pytest.raises(UnsupportedModelError, match=r"a classifier has an output logits \[texts, labels\]"):
        carryall.TextClassifier(names)
    with pytest.raises(RequestError, match="aggregation must be one of none, simple, first, average, max"):
        TokenClassifier(names).entities(TEXTS, aggregation="last")  # type: ignore[arg-type]
    inference = exported(tmp_path / "second", "inference")
    with pytest.raises(UnsupportedModelError, match=r"has an output logits \[texts, tokens, labels\]"):
        TokenClassifier(inference)
