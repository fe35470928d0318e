"""Processors and towers of LLaVA's families: what differs is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_vlms import write_vlm

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.image_processor import read_image_processor
from carryall.exporter.models import llava
from carryall.exporter.vision.llava import Processor
from carryall.runtime.tasks.export import export


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def test_every_value_of_a_processor_is_written_out(tmp_path: Path) -> None:
    export(write_vlm(tmp_path / "checkpoint", "llava_next"), tmp_path / "package")
    record = read_image_processor(tmp_path / "package" / "image_processor.json")
    assert isinstance(record, Processor)
    assert (record.tile, record.patch, record.class_token, record.constants) == (24, 8, True, 1)
    assert record.resolutions[0] == (24, 48)
    assert record.mean[0] == pytest.approx(0.48145466)


def test_sizes_that_published_files_leave_out_are_those_of_transformers() -> None:
    """llava-hf/llava-1.5-7b-hf states the length, the vocabulary and the epsilon of its decoder only."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064, "rms_norm_eps": 1e-5}
    config = llava.config({"model_type": "llava", "text_config": text})
    assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (4096, 32, 32)
    assert (config.intermediate_size, config.vocab_size) == (11_008, 32_064)


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("llava", {"image_processor_type": "OtherImageProcessor"}, "'OtherImageProcessor' is not supported"),
        ("llava", {"do_center_crop": False}, "'do_center_crop': False is not supported"),
        ("llava", {"size": {"shortest_edge": 32}}, "the tower's 'image_size' 24"),
        ("llava_next", {"image_grid_pinpoints": [[24, 24]]}, "differ from those of config.json"),
        ("llava_next", {"do_normalize": False}, "'do_normalize': False is not supported"),
    ],
)
def test_a_processor_that_is_not_known_is_refused_by_name(
    family: str, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", family)
    change(checkpoint / "preprocessor_config.json", **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=what):
        export(checkpoint, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vision_feature_layer": [-2, -5]}, "supported: one layer"),
        ({"vision_feature_layer": 9}, "is not one of 3 layers"),
        ({"vision_feature_select_strategy": "full"}, "'full' is not supported with 'clip_vision_model'"),
        ({"vision_config": {"model_type": "dinov2"}}, "the tower 'dinov2' is not supported"),
        ({"text_config": {"model_type": "mpt"}}, "the decoder 'mpt' is not supported"),
        ({"image_token_index": 7}, "no added token 7"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    checkpoint = write_vlm(tmp_path / "checkpoint", "llava")
    change(checkpoint / "config.json", **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=what):
        export(checkpoint, tmp_path / "package")
