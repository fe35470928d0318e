"""Processors and towers of Qwen's families: what differs is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vlms import write_vlm

from carryall.errors import CheckpointError, RequestError, UnsupportedModelError
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.vision.qwen2_vl import Processor
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.tasks.export import export


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def test_every_value_of_a_processor_is_written_out(tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint", "qwen2_5_vl"), tmp_path / "package")
    record = read_image_processor(tmp_path / "package" / "image_processor.json")
    assert isinstance(record, Processor)
    assert (record.min_pixels, record.max_pixels, record.frames, record.resample) == (512, 6000, 2, 3)
    assert (record.window, record.positions, record.rotary) == (2, 0, 8)
    assert record.texts == {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    # without a file on videos, frames are resized as pictures are
    assert (record.video_min_pixels, record.video_max_pixels, record.tokens_per_second) == (512, 6000, 4.0)
    export(write_vlm(tmp_path / "old", "qwen2_vl"), tmp_path / "old_package")
    record = read_image_processor(tmp_path / "old_package" / "image_processor.json")
    assert isinstance(record, Processor)
    assert (record.min_pixels, record.max_pixels, record.window) == (512, 6000, 0)
    assert record.tokens_per_second == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' is not supported"),
        ({"do_resize": False}, "'do_resize': False is not supported"),
        ({"size": {"height": 4, "width": 4}}, "'shortest_edge' and 'longest_edge' in pixels"),
        ({"size": {"shortest_edge": 9000, "longest_edge": 10}}, "'min_pixels' 9000 exceeds"),
        ({"patch_size": 16}, "its patches are not those of the tower"),
        ({"merge_size": 4}, "its patches are not those of the tower"),
        ({"resample": 9}, "'resample' must be"),
    ],
)
def test_a_processor_that_is_not_known_is_refused_by_name(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", "qwen3_vl")
    change(checkpoint / "preprocessor_config.json", **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=what):
        export(checkpoint, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("family", "part", "changes", "what"),
    [
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [9]}, "layers below 3"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": "all"}, "must hold layers"),
        ("qwen2_5_vl", "vision_config", {"hidden_size": 15}, "'rotary' 7 must be a multiple of 4"),
        ("qwen2_5_vl", "vision_config", {"hidden_act": "mish"}, "activation 'mish'"),
        ("qwen2_5_vl", "text_config", {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "with the sum 8"),
        (
            "qwen3_vl",
            "text_config",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic'",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    family: str, part: str, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", family)
    config = json.loads((checkpoint / "config.json").read_text())
    change(checkpoint / "config.json", **{part: {**config[part], **changes}})
    with pytest.raises((UnsupportedModelError, CheckpointError), match=what):
        export(checkpoint, tmp_path / "package")


def test_a_tokenizer_without_the_token_of_pictures_is_refused(tmp_path: Path) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", "qwen3_vl")
    change(checkpoint / "config.json", image_token_id=7)
    with pytest.raises(CheckpointError, match="no added token 7"):
        export(checkpoint, tmp_path / "package")


def test_a_picture_whose_attention_would_not_fit_is_refused_with_its_size(tmp_path: Path) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", "qwen2_vl")
    change(checkpoint / "preprocessor_config.json", max_pixels=10**6)
    export(checkpoint, tmp_path / "package")
    processor = read_image_processor(tmp_path / "package" / "image_processor.json")
    seen = ImageEncoder(processor, lambda _: np.zeros((0, 0), np.float32))
    with pytest.raises(
        RequestError, match="800 x 800 pixels makes 10000 patches of 8 pixels; the limit is 8192"
    ):
        seen.prepare(np.zeros((800, 800, 3), np.uint8))
    assert seen.prepare(np.zeros((700, 700, 3), np.uint8)).num_tokens == 1936


def test_a_processor_that_transformers_5_wrote_is_read(tmp_path: Path) -> None:
    """It is a part of processor_config.json, and counts if both files are there, as in transformers."""
    checkpoint = write_vlm(tmp_path / "checkpoint", "qwen3_vl")
    path = checkpoint / "preprocessor_config.json"
    content = {**json.loads(path.read_text()), "size": {"shortest_edge": 600, "longest_edge": 7000}}
    change(checkpoint / "processor_config.json", image_processor={**content, "do_pad": None})
    export(checkpoint, tmp_path / "both")
    path.unlink()
    export(checkpoint, tmp_path / "one")
    for package in ("both", "one"):
        record = read_image_processor(tmp_path / package / "image_processor.json")
        assert isinstance(record, Processor)
        assert (record.min_pixels, record.max_pixels, record.mean) == (600, 7000, (0.5, 0.5, 0.5))


@pytest.mark.parametrize("capped", [False, True])
def test_videos_whose_frames_are_capped_are_not_read(tmp_path: Path, capped: bool) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", "qwen3_vl")
    settings = json.dumps({"size": {}, "cap_pixels_per_frame": capped})
    (checkpoint / "video_preprocessor_config.json").write_text(settings, encoding="utf-8")
    export(checkpoint, tmp_path / "package")
    record = read_image_processor(tmp_path / "package" / "image_processor.json")
    assert ("video" in record.texts) != capped
