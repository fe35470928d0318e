"""The tower of Idefics3 and SmolVLM equals transformers, and a package holds all that a model sees with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tiny_vlms import write_vlm
from vision_golden import FAMILIES, golden_path, picture, transformers_answer

from carryall.errors import CheckpointError, PackageError, UnsupportedModelError
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.package import Package
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.tasks.export import export


def encoder(package: Path, cache_bytes: int = 1 << 20) -> ImageEncoder:
    session = onnxruntime.InferenceSession(package / "vision.onnx", providers=["CPUExecutionProvider"])
    processor = read_image_processor(package / "image_processor.json")
    return ImageEncoder(processor, lambda feeds: session.run(None, dict(feeds))[0], cache_bytes)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    export(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_picture_equal_transformers(family: str, tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint", family), tmp_path / "package")
    golden = np.load(golden_path(family))
    seen = encoder(tmp_path / "package")
    states = seen.states(seen.prepare(picture()))
    np.testing.assert_allclose(states, golden["image_states"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_other_pictures_equal_transformers_live(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    checkpoint = write_vlm(tmp_path / "checkpoint", family, seed=3)
    export(checkpoint, tmp_path / "package")
    seen = encoder(tmp_path / "package")
    for height, width in ((17, 200), (96, 96), (3, 3)):
        pixels = picture(height, width)
        expected = transformers_answer(checkpoint, pixels)["image_states"]
        np.testing.assert_allclose(seen.states(seen.prepare(pixels)), expected, rtol=1e-4, atol=1e-4)


def test_a_tile_has_the_same_states_alone_and_beside_others(package: Path) -> None:
    seen = encoder(package, cache_bytes=0)
    whole = seen.prepare(picture())
    together = seen.states(whole)
    size = whole.num_tokens // len(whole.prepared.units)
    for number, tile in enumerate(whole.prepared.units):
        alone = seen._encode([tile])[0]
        np.testing.assert_allclose(together[number * size : (number + 1) * size], alone, rtol=0, atol=2e-6)


def test_known_tiles_are_not_computed_again_within_the_budget(package: Path) -> None:
    seen = encoder(package)
    first = seen.states(seen.prepare(picture()))
    count = seen.num_encoded
    np.testing.assert_array_equal(seen.states(seen.prepare(picture())), first)
    assert seen.num_encoded == count
    seen.states(seen.prepare(picture(shift=1)))
    assert seen.num_encoded > count
    small = encoder(package, cache_bytes=first.nbytes // 2)
    for _ in range(2):
        np.testing.assert_allclose(small.states(small.prepare(picture())), first, rtol=0, atol=2e-6)
    assert small.num_encoded > count


def test_pictures_that_differ_in_a_pixel_or_in_shape_have_other_keys(package: Path) -> None:
    seen = encoder(package)
    changed = picture()
    changed[20, 30, 1] ^= 64
    flat = np.zeros((30, 150, 3), np.uint8)
    pictures = [picture(), changed, picture(90, 50), flat, flat.reshape(150, 30, 3)]
    assert len({seen.prepare(one).key for one in pictures}) == len(pictures)


def test_a_package_lists_what_it_sees_with_and_text_only_leaves_it_out(package: Path, tmp_path: Path) -> None:
    record = Package.open(package).record
    assert {"vision.onnx", "vision.onnx.data", "image_processor.json"} <= record.files.keys()
    assert {"preprocessor_config.json", "processor_config.json"} <= record.files.keys()
    export(write_vlm(tmp_path / "checkpoint"), tmp_path / "text", text_only=True)
    text = Package.open(tmp_path / "text")
    assert not text.sees
    assert "vision.onnx" not in text.record.files


def test_a_package_whose_tower_was_taken_or_exchanged_is_refused(package: Path, tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint"), tmp_path / "package")
    (tmp_path / "package" / "vision.onnx").write_bytes((package / "model.onnx").read_bytes())
    with pytest.raises(PackageError, match=r"vision.onnx is damaged"):
        Package.open(tmp_path / "package")
    (tmp_path / "package" / "vision.onnx").unlink()
    with pytest.raises(PackageError, match=r"vision.onnx is missing"):
        Package.open(tmp_path / "package")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' is not supported"),
        ({"do_normalize": False}, "'do_normalize': False is not supported"),
        ({"size": {"height": 4, "width": 4}}, "an integer 'longest_edge'"),
        ({"max_image_size": {"longest_edge": 31}}, "whole tokens"),
        ({"resample": 9}, "'resample' must be"),
        ({"image_std": [1, 1]}, "need 3 numbers"),
    ],
)
def test_a_processor_that_is_not_known_is_refused_by_name(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint")
    path = checkpoint / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=what):
        export(checkpoint, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_checkpoint_without_a_processor_needs_text_only(tmp_path: Path) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint")
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="--text-only"):
        export(checkpoint, tmp_path / "package")
    export(checkpoint, tmp_path / "package", text_only=True)


@pytest.mark.parametrize("content", ["{}", "[]", '{"version": 7}', "no"])
def test_a_damaged_record_of_the_processor_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "image_processor.json").write_text(content)
    with pytest.raises(PackageError):
        read_image_processor(tmp_path / "image_processor.json")
