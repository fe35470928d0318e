"""The graphs of TrOCR and Donut against transformers: encoders, decoders, their caches, in 3 runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from encoder_decoder_kit import RUNTIMES, first_feeds, next_feeds, opened, with_tokens
from tiny_trocr import CASES, PADDING, write_trocr
from trocr_golden import SEED, golden_path, pictures

from carryall.errors import CheckpointError, UnsupportedModelError, UsageError
from carryall.exporter.export import export_package
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.package import MODEL_FILE, VISION_FILE, Package
from carryall.runtime.images.encoding import ImageEncoder

Array = npt.NDArray[Any]
RTOL, ATOL = 1e-5, 3e-5  # logits are up to 17


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def package(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(case)
    return export_package(write_trocr(folder / "checkpoint", case, SEED), folder / "package").path


@pytest.fixture(scope="module")
def golden(case: str) -> dict[str, Array]:
    return dict(np.load(golden_path(case)))


@pytest.mark.long
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_encoder_equals_transformers(package: Path, golden: dict[str, Array], runtime: str) -> None:
    run = opened(package / VISION_FILE, runtime)
    processor = read_image_processor(package / "image_processor.json")
    encoder = ImageEncoder(processor, lambda feeds: run(feeds)["image_states"])
    for picture, expected in zip(pictures(), golden["states"], strict=True):
        np.testing.assert_allclose(encoder.states(encoder.prepare(picture)), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_decoder_equals_transformers_at_once_and_in_pieces(
    package: Path, golden: dict[str, Array], runtime: str
) -> None:
    run, ids = opened(package / MODEL_FILE, runtime), golden["tokens"][:, :-1]
    feeds, found = first_feeds(package / MODEL_FILE, golden["states"]), []
    whole = run(with_tokens(feeds, ids, 0))["logits"]
    np.testing.assert_allclose(whole, golden["logits"], rtol=RTOL, atol=ATOL)
    for begin, end in ((0, 1), (1, 2), (2, 9), (9, ids.shape[1])):
        outputs = run(with_tokens(feeds, ids[:, begin:end], begin))
        found.append(outputs["logits"])
        feeds = next_feeds(feeds, outputs)
    np.testing.assert_allclose(np.concatenate(found, axis=1), golden["logits"], rtol=RTOL, atol=ATOL)


def test_graphs_are_standard_operators_of_opset_23(package: Path) -> None:
    for name in (MODEL_FILE, VISION_FILE):
        model = onnx.load(package / name, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]


def test_a_package_keeps_what_it_sees_with_and_the_tokens_of_its_decoder(package: Path) -> None:
    opened = Package.open(package)
    assert opened.sees
    assert not opened.hears
    assert opened.record.context_length == 48
    assert opened.record.eos_token_ids == (257,)


def changed(folder: Path, file: str, **changes: Any) -> None:
    content = json.loads((folder / file).read_text())
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        (content[part] if part else content)[key] = value
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "vit",
            {"encoder__model_type": "beit"},
            "the encoder 'beit' is not supported; supported: vit, deit, donut-swin",
        ),
        (
            "vit",
            {"decoder__model_type": "bert"},
            "the decoder 'bert' is not supported; supported: trocr, mbart",
        ),
        ("donut", {"encoder__window_size": 7}, "'window_size' 7 of Swin is not supported; supported: 1 to 6"),
        ("donut", {"encoder__layer_norm_eps": 1e-6}, "'layer_norm_eps' 1e-06 of Swin is not supported"),
        ("donut", {"encoder__use_absolute_embeddings": True}, "'use_absolute_embeddings': true"),
        ("vit-sinusoidal", {"decoder__decoder_start_token_id": PADDING}, "that is not its 'pad_token_id'"),
    ],
)
def test_other_encoders_and_decoders_are_refused_by_name(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    source = write_trocr(tmp_path / "source", case)
    changed(source, "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        export_package(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "changes", "error", "message"),
    [
        ("vit", {"feature_extractor_type": "DonutFeatureExtractor"}, UnsupportedModelError, "'DonutFeature"),
        (
            "vit",
            {"size": 32},
            UnsupportedModelError,
            "tiles of 32 pixels are not supported",
        ),
        ("vit", {"size": {"height": 24, "width": 32}}, UnsupportedModelError, "a height and equal width"),
        ("vit", {"do_normalize": False}, UnsupportedModelError, "'do_normalize': False"),
        ("deit", {"size": {"height": 16, "width": 16}}, CheckpointError, "larger than its picture of 16"),
        (
            "donut",
            {"size": [32, 24]},
            UnsupportedModelError,
            "pages of 32 x 24 .*; supported: the encoder's 24 x 32",
        ),
        ("donut", {"size": 32}, UnsupportedModelError, "'size' 32 is not supported"),
        ("donut", {"do_thumbnail": False}, UnsupportedModelError, "'do_thumbnail': False"),
        (
            "donut",
            {"image_processor_type": "ViTImageProcessor"},
            UnsupportedModelError,
            "'ViTImageProcessor'",
        ),
    ],
)
def test_processors_that_are_not_computed_are_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    source = write_trocr(tmp_path / "source", case)
    changed(source, "preprocessor_config.json", **changes)
    with pytest.raises(error, match=message):
        export_package(source, tmp_path / "out")


def test_a_model_that_writes_down_pictures_keeps_its_encoder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="omit text_only"):
        export_package(write_trocr(tmp_path / "source"), tmp_path / "out", text_only=True)
