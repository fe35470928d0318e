"""Encoders of texts and pictures compute the vectors of transformers, through each door of the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_encoder_golden import HYPOTHESIS, LABELS
from seeing_golden import pictures
from tiny_encoders import write_tiny_encoder
from tiny_picture_encoders import CASES, END, LENGTH, TEXTS, write_picture_encoder
from vision_golden import golden_path

import carryall
from carryall.errors import PromptTooLongError, RequestError, UnsupportedModelError
from carryall.runtime.api.text_encoder import TextEncoder

BOTH: list[Any] = [*TEXTS, *({"image": picture} for picture in pictures())]


def golden(case: str) -> dict[str, Any]:
    with np.load(golden_path(case)) as file:
        return dict(file)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("picture_encoders")
    for case in CASES:
        carryall.export(write_picture_encoder(folder / "checkpoints" / case, case), folder / case)
    return {case: folder / case for case in CASES}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("provider", ["cpu", "CPUExecutionProvider"])
def test_vectors_equal_those_of_transformers(packages: dict[str, Path], case: str, provider: str) -> None:
    encoder = TextEncoder(packages[case], providers=[provider])
    expected = golden(case)
    vectors = encoder.embed(BOTH)
    both = np.concatenate([expected["text_features"], expected["image_features"]])
    np.testing.assert_allclose(vectors, both, rtol=1e-5, atol=1e-5)
    assert encoder.sees
    np.testing.assert_array_equal(encoder.embed(BOTH[::-1])[-1], encoder.embed(BOTH[:1])[0])


@pytest.mark.parametrize("case", CASES)
def test_texts_run_without_padding_and_labels_have_the_scores_of_transformers(
    packages: dict[str, Path], case: str
) -> None:
    encoder = TextEncoder(packages[case])
    assert encoder._batches.session.padded is None
    shown = [{"image": picture} for picture in pictures()]
    scores = encoder.zero_shot(shown, LABELS, hypothesis=HYPOTHESIS)
    np.testing.assert_allclose(scores, golden(case)["scores"], rtol=1e-5, atol=1e-5)
    assert encoder.zero_shot([], LABELS, hypothesis=HYPOTHESIS).shape == (0, 3)


def test_a_checkpoint_and_a_quantized_package_see_too(packages: dict[str, Path], tmp_path: Path) -> None:
    source = packages["clip"].parent / "checkpoints/clip"
    np.testing.assert_array_equal(TextEncoder(source).embed(BOTH), TextEncoder(packages["clip"]).embed(BOTH))
    carryall.export(source, tmp_path / "int8", quantize="int8")
    vectors, exact = TextEncoder(tmp_path / "int8").embed(BOTH), TextEncoder(source).embed(BOTH)
    np.testing.assert_array_equal(vectors[len(TEXTS) :], exact[len(TEXTS) :])
    cosines = TextEncoder(source).similarity(vectors, exact).diagonal()
    assert (cosines > 0.99).all()
    assert (vectors[: len(TEXTS)] != exact[: len(TEXTS)]).any()


def test_a_text_ends_with_its_first_end_token(packages: dict[str, Path]) -> None:
    encoder = TextEncoder(packages["clip"])
    alone, typed, ids = encoder.embed(["ab", "ab</s> cd", [256, 97, END]])
    np.testing.assert_array_equal(typed, alone)
    assert (ids != alone).any()
    with pytest.raises(RequestError, match="text 1 has no token 257, which ends texts of this model"):
        encoder.embed(["ab", [256, 97]])


def test_texts_of_siglip_have_one_length(packages: dict[str, Path]) -> None:
    for case, ids in (("siglip", [257, *[256] * 18]), ("siglip2", [])):
        (tokens,) = TextEncoder(packages[case]).encode(["x"])
        assert len(tokens.ids) == LENGTH
        assert tokens.ids[1:] == (ids or [*[256] * 17, 120 - 32, 257][: LENGTH - 1]) or case == "siglip2"
    upper, lower = TextEncoder(packages["siglip2"]).embed(["A CAT", "a cat"])
    np.testing.assert_array_equal(upper, lower)
    with pytest.raises(PromptTooLongError, match=f"the model takes {LENGTH}"):
        TextEncoder(packages["siglip"]).embed(["x" * 30])
    long, cut = TextEncoder(packages["siglip"]).embed(["x" * 30, "x" * 19], truncate=True)
    np.testing.assert_array_equal(long, cut)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"image": b"no picture"}, "text 1: a picture of 10 bytes is of no supported format"),
        ({"image": "https://example.com/cat.png"}, "text 1: pictures are not fetched from addresses"),
        ({"image": np.zeros((0, 3, 3), np.uint8)}, "text 1: a picture of 3 x 0 pixels has no pixels"),
        ({"image": "missing.png"}, "text 1: the picture missing.png cannot be read"),
        ({"video": "x"}, "text 1 must have a 'text' or an 'image'"),
        ({"image": np.zeros((1, 300, 3), np.uint8)}, "text 1: .* longer than 200 times its other side"),
    ],
)
def test_bad_pictures_are_named(packages: dict[str, Path], entry: dict[str, Any], message: str) -> None:
    encoder = TextEncoder(packages["clip"])
    with pytest.raises(RequestError, match=message):
        encoder.embed(["x", entry])
    assert np.isfinite(encoder.embed(["x", {"text": "y"}])).all()


def test_a_model_of_texts_takes_no_pictures(packages: dict[str, Path], tmp_path: Path) -> None:
    source = packages["clip"].parent / "checkpoints/clip"
    carryall.export(source, tmp_path / "blind", text_only=True)
    for encoder in (
        TextEncoder(tmp_path / "blind"),
        TextEncoder(write_tiny_encoder(tmp_path / "bert", "bert"), pooling="mean"),
    ):
        assert not encoder.sees
        with pytest.raises(RequestError, match="this model reads text only, not images"):
            encoder.embed(BOTH)
    encoder = TextEncoder(packages["clip"])
    with pytest.raises(RequestError, match="a picture has a dense vector"):
        encoder.embed_tokens(BOTH)
    with pytest.raises(RequestError, match="is of pictures"):
        encoder.zero_shot(["x"], LABELS)
    with pytest.raises(RequestError, match="no 'independent' scores"):
        encoder.zero_shot(BOTH[-1:], LABELS, independent=True)


@pytest.mark.parametrize(
    ("case", "file", "change", "message"),
    [
        ("clip", "preprocessor_config.json", {"do_center_crop": False}, "'do_center_crop': False"),
        ("clip", "preprocessor_config.json", {"size": {"shortest_edge": 30}}, "supported: the tower's"),
        ("siglip", "preprocessor_config.json", {"size": {"height": 9, "width": 9}}, "supported: the tower's"),
        ("siglip2", "preprocessor_config.json", {"image_processor_type": "X"}, "the processor 'X'"),
        ("siglip", "config.json", {"architectures": ["SiglipForImageClassification"]}, "architecture"),
    ],
)
def test_other_options_are_refused_by_name(
    tmp_path: Path, case: str, file: str, change: dict[str, Any], message: str
) -> None:
    source = write_picture_encoder(tmp_path / "source", case)
    content = json.loads((source / file).read_text())
    (source / file).write_text(json.dumps({**content, **change}))
    with pytest.raises(UnsupportedModelError, match=message):
        carryall.export(source, tmp_path / "package")
    assert not (tmp_path / "package").exists()
