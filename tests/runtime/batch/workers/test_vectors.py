"""Batch jobs with an encoder: tables to tables of vectors, resumed; ranks and scores by line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeing_golden import pictures
from sentence_models import TEXTS, write_classifier, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder
from tiny_picture_encoders import write_picture_encoder

import carryall
from carryall.errors import UsageError

pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path_factory.mktemp("cache")))


def encoder(folder: Path, name: str = "cls") -> Path:
    carryall.export(write_sentence_model(folder / "source", name), folder / "encoder")
    return folder / "encoder"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_becomes_a_table_of_vectors_and_a_stopped_job_goes_on(tmp_path: Path, form: str) -> None:
    from pyarrow import parquet, table

    model = encoder(tmp_path)
    texts = [f"{n % 97} {TEXTS[n % 3]}"[:37] for n in range(1500)]
    names, source = [f"row{n}" for n in range(len(texts))], tmp_path / f"in.{form}"
    if form == "parquet":
        parquet.write_table(table({"id": names, "text": texts}), source)
    else:
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "text"], *zip(names, texts, strict=True)])
    options: dict[str, Any] = {
        "model": str(model),
        "template": "{{ text }}",
        "kind": "embedding",
        "keep": ["id"],
    }
    first = carryall.batch.run(source, tmp_path / "out.parquet", **options)
    next(iter(first))  # an answer is there
    first.stop()
    assert not first.wait(120).finished
    outcome = carryall.batch.run(source, tmp_path / "out.parquet", **options).wait(120)
    assert outcome.finished
    assert 0 < outcome.answered_before <= 1500  # a fast machine answers all before it stops
    rows = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert rows["id"] == names
    expected = carryall.TextEncoder(model).embed(texts)
    np.testing.assert_allclose(np.array(rows["embedding"], np.float32), expected, rtol=1e-5, atol=1e-5)


def test_lines_fail_alone(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    bodies: list[dict[str, Any]] = [
        {"input": TEXTS, "dimensions": 4, "prompt_name": "query", "truncate": True},
        {"input": "x" * 99},
        {"input": "y", "encoding_format": "base64"},
        {"query": "b", "documents": TEXTS},
        {"url": "/v1/score", "custom_id": "s", "body": {"text_1": "b", "text_2": TEXTS}},
        {"prompt": "generate"},
        {"input": "z", "pooling": "mean"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    carryall.batch.run(
        source, tmp_path / "out.jsonl", errors=str(tmp_path / "errors.jsonl"), model=str(model)
    ).wait()
    oracle = carryall.TextEncoder(model)
    answers = {line["id"]: line["response"]["body"] for line in lines(tmp_path / "out.jsonl")}
    vectors = [each["embedding"] for each in answers["batch_req_1"]["data"]]
    expected = oracle.embed(TEXTS, prompt="query", dimensions=4, truncate=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(answers["batch_req_3"]["data"][0]["embedding"], str)
    dense = oracle.embed(["b", *TEXTS])
    similarity = dense[1:] @ dense[0]
    ranked = answers["batch_req_4"]["results"]
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda place: -similarity[place])
    scores = [each["score"] for each in answers["batch_req_5"]["data"]]
    np.testing.assert_allclose(scores, similarity, rtol=1e-5, atol=1e-5)
    errors = {line["error"]["line"]: line["error"]["message"] for line in lines(tmp_path / "errors.jsonl")}
    assert errors.keys() == {2, 6, 7}
    assert "has 100 tokens; the model takes 38" in errors[2]
    assert "is an encoder; it cannot answer /v1/completions" in errors[6]
    assert "has its own pooling" in errors[7]


def test_pieces_of_documents_and_vectors_of_tokens(tmp_path: Path) -> None:
    for name, bodies in (
        (
            "mean-later-key",
            [{"input": TEXTS[1:], "late_chunking": True}, {"input": ["x" * 30] * 2, "late_chunking": True}],
        ),
        ("colbert", [{"query": "b", "documents": TEXTS}, {"query": "b", "documents": ["x", "y" * 99]}]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        model = encoder(folder, name)
        (folder / "in.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies))
        carryall.batch.run(folder / "in.jsonl", folder / "out.jsonl", model=str(model)).wait()
        (line,) = lines(folder / "out.jsonl")
        (error,) = lines(folder / "out.errors.jsonl")
        body, oracle = line["response"]["body"], carryall.TextEncoder(model)
        if name == "colbert":
            scores = {each["index"]: each["relevance_score"] for each in body["results"]}
            np.testing.assert_allclose(
                [scores[place] for place in range(3)], oracle.rerank("b", TEXTS), rtol=1e-5
            )
            assert "document 1 has" in error["error"]["message"]
        else:
            vectors = [each["embedding"] for each in body["data"]]
            expected = oracle.embed(TEXTS[1:], late_chunking=True)
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)
            assert "the document has 61 tokens" in error["error"]["message"]


def test_a_reranker_scores_lines(tmp_path: Path) -> None:
    source = write_tiny_encoder(tmp_path / "source", "bert", CLASSIFIER, id2label={"0": "LABEL_0"})
    carryall.export(source, tmp_path / "ranker")
    (tmp_path / "in.jsonl").write_text(json.dumps({"query": "q", "documents": TEXTS}) + "\n")
    carryall.batch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=str(tmp_path / "ranker")).wait()
    (line,) = lines(tmp_path / "out.jsonl")
    scores = carryall.TextClassifier(tmp_path / "ranker").rerank("q", TEXTS)
    for each in line["response"]["body"]["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)


def test_what_an_encoder_cannot_do_is_refused_before_any_line(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(UsageError, match="is an encoder; it has no option max_slots"):
        carryall.batch.run(
            tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=str(model), loading={"max_slots": 2}
        ).wait()
    carryall.export(write_classifier(tmp_path / "names-source", "names"), tmp_path / "names")
    with pytest.raises(UsageError, match="classifies tokens"):
        carryall.batch.run(tmp_path / "in.jsonl", tmp_path / "o.jsonl", model=str(tmp_path / "names")).wait()


def test_lines_with_pictures_beside_the_job_have_their_vectors(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    carryall.export(write_picture_encoder(tmp_path / "source", "clip"), tmp_path / "clip")
    image.fromarray(pictures()[0]).save(tmp_path / "cat.png")
    inputs: list[Any] = ["a cat", {"image": "file:cat.png"}, [{"image": "file:cat.png"}, "a cat"]]
    inputs += [{"image": "https://example.com/cat.png"}]
    body = {"normalize": False}
    (tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": str(n), "body": {**body, "input": each}}) + "\n"
            for n, each in enumerate(inputs)
        )
    )
    errors = tmp_path / "errors.jsonl"
    outcome = carryall.batch.run(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", errors=str(errors), model=str(tmp_path / "clip")
    ).wait(120)
    assert outcome.finished
    answers = {line["custom_id"]: line for line in lines(tmp_path / "out.jsonl")}
    text, picture = carryall.TextEncoder(tmp_path / "clip").embed(["a cat", {"image": tmp_path / "cat.png"}])
    for number, expected in (("0", [text]), ("1", [picture]), ("2", [picture, text])):
        rows = [row["embedding"] for row in answers[number]["response"]["body"]["data"]]
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
    assert "not fetched from addresses" in errors.read_text()
