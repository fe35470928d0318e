"""``carryall embed`` and ``carryall rerank`` print what the encoders compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from seeing_golden import pictures
from sentence_models import TEXTS, write_sentence_model
from tiny_encoders import CLASSIFIER, write_tiny_encoder
from tiny_picture_encoders import write_picture_encoder

import carryall
from carryall.cli.group import carryall as command


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    carryall.export(write_sentence_model(folder / "source", "cls"), folder / "encoder")
    return folder / "encoder"


def run(*arguments: str, code: int = 0, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(command, arguments, input=stdin)
    assert result.exit_code == code, result.output
    return result.stderr if code else [json.loads(line) for line in result.stdout.splitlines()]


def test_vectors_are_printed_or_written(encoder: Path, tmp_path: Path) -> None:
    expected = carryall.TextEncoder(encoder).embed(TEXTS)
    np.testing.assert_allclose(run("embed", str(encoder), *TEXTS), expected, rtol=0, atol=1e-6)
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    run("embed", str(encoder), "--lines", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "v.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "v.npy"]
    (short,) = run(
        *("embed", str(encoder), "--lines", "-", "--dimensions", "3", "--prompt-name", "query"), stdin="b\n"
    )
    cut = carryall.TextEncoder(encoder).embed(["b"], prompt="query", dimensions=3)[0]
    np.testing.assert_allclose(short, cut, rtol=0, atol=1e-6)
    (rows,) = run("embed", str(encoder), "b", "--kind", "multi")
    assert np.array(rows).shape == (2, 16)


def test_lines_end_with_line_feeds_and_empty_ones_are_told(encoder: Path) -> None:
    arguments = ["embed", str(encoder), "--lines", "-"]
    result = CliRunner().invoke(command, arguments, input="a\u2028b\r\n\nc\n")
    assert result.exit_code == 0
    assert "note: 1 empty lines of - are left out" in result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    expected = carryall.TextEncoder(encoder).embed(["a\u2028b", "c"])
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give texts, or a file of them with --lines"),
        (["a", "--lines", "x"], "give texts, or a file of them with --lines"),
        (["--lines", "missing.txt"], "missing.txt cannot be read"),
        (["a", "-o", "x.csv"], "writes dense vectors to an .npy file"),
        (["a", "--kind", "sparse"], "has no sparse vectors"),
        (["a", "--kind", "multi", "--dimensions", "3"], "--dimensions is for dense vectors"),
        (["x" * 99], "text 0 has 100 tokens; the model takes 38"),
    ],
)
def test_bad_arguments_are_named(encoder: Path, arguments: list[str], message: str) -> None:
    assert message in run("embed", str(encoder), *arguments, code=2)


def test_a_file_that_is_no_encoder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "decoder.gguf"
    file.write_bytes(b"GGUF")
    result = CliRunner().invoke(command, ["embed", str(file), "x"])
    assert result.exit_code == 2
    assert f"{file} is not a package, a checkpoint or a folder of an encoder" in result.stderr


def test_documents_are_ranked(encoder: Path, tmp_path: Path) -> None:
    source = write_tiny_encoder(tmp_path / "source", "bert", CLASSIFIER, id2label={"0": "LABEL_0"})
    carryall.export(source, tmp_path / "ranker")
    scores = carryall.TextClassifier(tmp_path / "ranker").rerank("q", TEXTS)
    order = sorted(range(3), key=lambda place: -scores[place])
    (ranked,) = run("rerank", str(tmp_path / "ranker"), "q", *TEXTS, "--json", "--top", "2")
    assert [each["index"] for each in ranked] == order[:2]
    assert [each["score"] for each in ranked] == [
        pytest.approx(scores[place], abs=1e-6) for place in order[:2]
    ]
    (similar,) = run("rerank", str(encoder), "b", *TEXTS, "--json")
    assert (similar[0]["text"], similar[0]["score"]) == ("b", pytest.approx(1, abs=1e-6))


def test_pictures_are_embedded_behind_the_texts(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    carryall.export(write_picture_encoder(tmp_path / "source", "clip"), tmp_path / "clip")
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for path, pixels in zip(files, pictures(), strict=True):
        image.fromarray(pixels).save(path)
    options = [part for path in files for part in ("--image", str(path))]
    encoder = carryall.TextEncoder(tmp_path / "clip")
    expected = encoder.embed(["a cat", *({"image": path} for path in files)])
    np.testing.assert_allclose(run("embed", str(tmp_path / "clip"), "a cat", *options), expected, atol=1e-6)
    np.testing.assert_allclose(run("embed", str(tmp_path / "clip"), *options), expected[1:], atol=1e-6)
    (tmp_path / "bad.png").write_bytes(b"x")
    bad = str(tmp_path / "bad.png")
    assert "text 1: a picture of 1 bytes" in run("embed", str(tmp_path / "clip"), "a", "--image", bad, code=2)
    many = run("embed", str(tmp_path / "clip"), *options, "--late-chunking", code=2)
    assert "late chunking needs a model that pools by the mean" in many
