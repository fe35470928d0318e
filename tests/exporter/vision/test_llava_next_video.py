"""What LLaVA-NeXT-Video makes of frames is read from its files; other ways to join patches are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_llavas import VIDEO_ID
from tiny_vlms import write_vlm

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.image_processor import image_processor

FAMILY = "llava_next_video"


def record(folder: Path, **changes: Any) -> Any:
    write_vlm(folder, FAMILY)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return image_processor(folder, json.loads(path.read_text()))


def test_frames_join_squares_of_patches(tmp_path: Path) -> None:
    processor = record(tmp_path)
    assert (processor.pool, processor.video_token_id, processor.constants) == (2, VIDEO_ID, 1)
    assert processor.texts == {"image": "<image>", "video": "<video>"}


def test_frames_of_another_size_than_tiles_are_not_read(tmp_path: Path) -> None:
    write_vlm(tmp_path, FAMILY)
    sizes = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(sizes))
    processor = image_processor(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert processor.video_token_id == -1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"spatial_pool_mode": "conv"}, UnsupportedModelError, "'spatial_pool_mode' 'conv' is not supported"),
        ({"spatial_pool_stride": 3}, CheckpointError, "4 patches along an edge do not hold squares of 3"),
        ({"video_token_index": 7}, CheckpointError, "no added token 7"),
    ],
)
def test_other_forms_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        record(tmp_path, **changes)
