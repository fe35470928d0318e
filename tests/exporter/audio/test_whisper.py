"""The graphs of Whisper against transformers: encoder, decoder, its caches, in three runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from encoder_decoder_kit import RUNTIMES, first_feeds, next_feeds, opened, with_tokens
from tiny_whisper import FEATURES, write_whisper
from whisper_golden import PATH, SEED

from carryall.errors import CheckpointError, UnsupportedModelError, UsageError
from carryall.exporter.export import export_package
from carryall.exporter.package import AUDIO_FILE, MODEL_FILE, Package

Array = npt.NDArray[Any]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    return export_package(write_whisper(folder / "checkpoint", SEED), folder / "package").path


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    return dict(np.load(PATH))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_encoder_equals_transformers(package: Path, golden: dict[str, Array], runtime: str) -> None:
    found = opened(package / AUDIO_FILE, runtime)({"input_features": golden["features"]})["audio_states"]
    np.testing.assert_allclose(found, golden["states"], atol=TOLERANCE)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_decoder_equals_transformers_at_once_and_in_pieces(
    package: Path, golden: dict[str, Array], runtime: str
) -> None:
    run, ids = opened(package / MODEL_FILE, runtime), golden["tokens"][:, :-1]
    start = first_feeds(package / MODEL_FILE, golden["states"])
    wanted = golden["logits"]
    np.testing.assert_allclose(run(with_tokens(start, ids, 0))["logits"], wanted, atol=TOLERANCE)
    feeds, found = start, []
    for begin, end in ((0, 4), (4, 5), (5, 17), (17, ids.shape[1])):
        outputs = run(with_tokens(feeds, ids[:, begin:end], begin))
        found.append(outputs["logits"])
        feeds = next_feeds(feeds, outputs)
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, atol=TOLERANCE)


def test_rows_of_an_encoder_may_be_padding(package: Path, golden: dict[str, Array]) -> None:
    run, ids = opened(package / MODEL_FILE, "onnxruntime"), golden["tokens"][:1, :6]
    short = golden["states"][:1, :40]
    alone = run(with_tokens(first_feeds(package / MODEL_FILE, short), ids, 0))["logits"]
    padded = np.concatenate([short, np.full((1, 9, short.shape[2]), 3.0, np.float32)], axis=1)
    feeds = first_feeds(package / MODEL_FILE, padded)
    feeds["encoder_attention_mask"][:, 40:] = 0
    np.testing.assert_allclose(run(with_tokens(feeds, ids, 0))["logits"], alone, atol=TOLERANCE)


def test_graphs_are_standard_operators_of_opset_23(package: Path) -> None:
    for name in (MODEL_FILE, AUDIO_FILE):
        model = onnx.load(package / name, load_external_data=False)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]


def test_a_package_keeps_what_it_hears_with(package: Path) -> None:
    opened = Package.open(package)
    assert opened.hears
    assert not opened.sees
    assert json.loads((package / "audio_processor.json").read_text()) == {
        "version": 1,
        "family": "whisper",
        "mels": 16,
        "rate": 16000,
        "hop": 160,
        "size": 400,
        "seconds": 2,
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"feature_extractor_type": "EncodecFeatureExtractor"},
            UnsupportedModelError,
            "EncodecFeatureExtractor",
        ),
        ({"dither": 0.1}, UnsupportedModelError, "'dither' other than 0"),
        ({"feature_size": 80}, CheckpointError, "200 spectra of 80 bands do not fit config.json"),
        ({"chunk_length": 3}, CheckpointError, "takes 200 of 16"),
        ({"hop_length": 0}, CheckpointError, "'hop' must be an integer in"),
    ],
)
def test_processors_that_are_not_computed_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    source = write_whisper(tmp_path / "source")
    (source / "preprocessor_config.json").write_text(json.dumps({**FEATURES, **changes}))
    with pytest.raises(error, match=message):
        export_package(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_writes_down_sound_keeps_its_encoder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="omit text_only"):
        export_package(write_whisper(tmp_path / "source"), tmp_path / "out", text_only=True)
