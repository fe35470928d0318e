"""A decoder and its vision tower in GGUF see what the checkpoint that they were converted from sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tiny_gguf import write_gguf
from tiny_mmproj import TYPES, write_pair, write_seeing
from vision_golden import picture

from carryall.errors import CarryallError, CarryallWarning, CheckpointError, UnsupportedModelError
from carryall.exporter.export import export_package
from carryall.exporter.gguf.seeing import SeeingGgufFile, tower_of
from carryall.exporter.gguf.tower import projectors
from carryall.exporter.image_processor import ImageProcessor, read_image_processor
from carryall.runtime.images.encoding import ImageEncoder

FAMILIES = ("gemma3", "idefics3", "qwen2_vl", "qwen2_5_vl")
PICTURES = (picture(50, 90), picture(70, 37, 9))


def encoder(package: Path) -> ImageEncoder:
    session = onnxruntime.InferenceSession(package / "vision.onnx", providers=["CPUExecutionProvider"])
    processor = read_image_processor(package / "image_processor.json")
    return ImageEncoder(processor, lambda feeds: session.run(None, dict(feeds))[0])


def in_single(processor: ImageProcessor) -> ImageProcessor:
    """The record with mean and deviation as GGUF holds them, and as they are computed with."""
    mean, std = (tuple(np.array(each, np.float32).tolist()) for each in (processor.mean, processor.std))
    return replace(processor, mean=mean, std=std)


def seen(package: Path) -> tuple[ImageProcessor, list[Any], Any]:
    """The record, the pixels, and the states of the tower, of two pictures."""
    here = encoder(package)
    prepared = [here.prepare(each, several=True) for each in PICTURES]
    pixels = [unit for each in prepared for unit in each.prepared.units]
    return here.processor, pixels, np.concatenate([here.states(each) for each in prepared])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_a_pair_sees_as_its_checkpoint(tmp_path: Path, family: str, kind: str) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", family)
    pair = write_pair(checkpoint, tmp_path / "pair", tower=kind)
    processor, pixels, states = seen(export_package(checkpoint, tmp_path / "one").path)
    found, found_pixels, found_states = seen(export_package(pair, tmp_path / "two").path)
    assert found == in_single(processor)
    for left, right in zip(found_pixels, pixels, strict=True):
        np.testing.assert_array_equal(left, right)
    np.testing.assert_allclose(found_states, states, rtol=1e-6, atol=1e-6)


def test_every_projector_type_has_a_pair() -> None:
    assert set(projectors()) == {TYPES[family] for family in FAMILIES}


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen2_vl"])
def test_the_names_of_early_converters_are_read(tmp_path: Path, family: str) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", family)
    found = [
        seen(
            export_package(
                write_pair(checkpoint, tmp_path / name, early=early), tmp_path / f"{name}-package"
            ).path
        )
        for name, early in (("now", False), ("early", True))
    ]
    np.testing.assert_array_equal(found[0][2], found[1][2])


def test_an_edge_that_early_files_do_not_state_is_that_of_the_published_checkpoints(tmp_path: Path) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", "idefics3")
    pair = write_pair(checkpoint, tmp_path / "pair", clip={"vision.preproc_image_size": None})
    processor = seen(export_package(pair, tmp_path / "one").path)[0]
    assert (processor.longest_edge, processor.tile) == (128, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "options", "kind", "message"),
    [
        (
            "gemma3",
            {"clip": {"vision.projection_dim": 40}},
            CheckpointError,
            "rows of 40 values .* of 32; move",
        ),
        (
            "gemma3",
            {"without": "v.blk.1.attn_q.weight"},
            CheckpointError,
            r"no tensor 'v\.blk\.1\.attn_q\.weight'",
        ),
        (
            "idefics3",
            {"without": "mm.model.fc.weight"},
            CheckpointError,
            r"no tensor 'mm\.model\.fc\.weight'",
        ),
        (
            "qwen2_vl",
            {"without": "v.patch_embd.weight.1"},
            CheckpointError,
            r"no tensor 'v\.patch_embd\.weight\.1'",
        ),
        (
            "gemma3",
            {"clip": {"vision.image_mean": None}},
            CheckpointError,
            "not state 'clip.vision.image_mean'",
        ),
        (
            "gemma3",
            {"clip": {"vision.block_count": "two"}},
            CheckpointError,
            "'clip.vision.block_count' is 'two'",
        ),
    ],
)
def test_a_tower_that_does_not_fit_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], kind: type[CarryallError], message: str
) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", family), tmp_path / "pair", **options)
    with pytest.raises(kind, match=message):
        tower_of(pair)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (
            {"projector_type": "internvl"},
            "type 'internvl' are not supported; these are: gemma3, idefics3, qwen",
        ),
        ({"use_gelu": False}, "has the activation 'none', .* have 'use_gelu'"),
        ({"vision.feature_layer": [1]}, "clip.vision.feature_layer = .1., which is not supported"),
    ],
)
def test_a_tower_that_is_not_supported_leaves_text(
    tmp_path: Path, clip: dict[str, Any], message: str
) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", "gemma3"), tmp_path / "pair", clip=clip)
    with pytest.warns(CarryallWarning, match=f"{message}.*; model.gguf reads text only"):
        assert tower_of(pair) is None
    with pytest.raises(UnsupportedModelError, match=message):
        SeeingGgufFile(pair, pair.with_name("mmproj-model.gguf"))


def test_a_damaged_tower_is_refused(tmp_path: Path) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", "gemma3"), tmp_path / "pair")
    tower = pair.with_name("mmproj-model.gguf")
    content = tower.read_bytes()
    for length in (0, 100, len(content) - 5000):
        tower.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"mmproj-model\.gguf"):
            tower_of(pair)


def test_the_tower_of_another_model_in_the_folder_is_not_taken(tmp_path: Path) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", "gemma3"), tmp_path / "pair")
    other = pair.with_name("other.gguf")
    write_gguf("llama", other)
    tower = pair.with_name("mmproj-model.gguf")
    assert (tower_of(pair), tower_of(other)) == (tower, None)
    tower.with_name("mmproj-two.gguf").write_bytes(tower.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"several vision towers of model\.gguf: mmproj-model\.gguf, mmproj-two"
    ):
        tower_of(pair)
    assert tower_of(other) is None
