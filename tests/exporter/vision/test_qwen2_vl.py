"""Processors and towers of Qwen's families: what differs is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_vlms import write_vlm

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.vision.qwen2_vl import Processor
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
    assert record.texts == {"image": "<|image_pad|>"}
    export(write_vlm(tmp_path / "old", "qwen2_vl"), tmp_path / "old_package")
    record = read_image_processor(tmp_path / "old_package" / "image_processor.json")
    assert isinstance(record, Processor)
    assert (record.min_pixels, record.max_pixels, record.window) == (512, 6000, 0)


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
