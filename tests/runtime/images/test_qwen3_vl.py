"""Frames of Qwen3-VL have the sizes that transformers gives them, and times in front of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from carryall.exporter.image_processor import HALF
from carryall.exporter.vision.qwen3_vl import Processor
from carryall.runtime.images import qwen3_vl
from carryall.runtime.images.video import open_video

# Frames, height and width, and the resized ones: ``smart_resize`` of transformers 5.24, with its defaults.
# fmt: off
SIZES = [
    (3, 1223, 1280, 480, 512), (33, 31, 20, 96, 64), (8, 541, 640, 288, 320), (256, 973, 1723, 32,
    64), (8, 33, 320, 64, 416), (33, 20, 32, 64, 96), (3, 20, 20, 224, 224), (5, 720, 1920, 224,
    640), (8, 1080, 320, 576, 160), (5, 20, 288, 64, 640), (3, 720, 853, 448, 544), (8, 720, 1280,
    224, 416), (33, 720, 640, 160, 128), (5, 20, 853, 32, 1376), (33, 33, 1280, 32, 960), (33, 31,
    640, 32, 672), (256, 480, 32, 192, 32), (2, 1080, 1280, 576, 672), (2, 33, 853, 64, 1312), (8,
    720, 32, 704, 32), (2, 20, 1280, 32, 2048), (33, 480, 640, 128, 160), (2, 20, 32, 224, 352),
    (33, 20, 640, 32, 864), (8, 480, 20, 768, 32), (5, 481, 320, 480, 320), (8, 1080, 1920, 224,
    416), (256, 1785, 853, 64, 32), (8, 240, 853, 160, 576), (8, 538, 1280, 192, 480), (2, 720,
    1280, 448, 832), (2, 33, 1280, 64, 1600), (8, 481, 853, 224, 416), (256, 20, 20, 32, 32), (256,
    481, 524, 32, 32), (5, 481, 1280, 224, 640), (3, 481, 853, 384, 672), (5, 720, 20, 1152, 32),
    (33, 33, 640, 32, 640), (256, 480, 1280, 32, 64),
]
# fmt: on


def processor(**changes: Any) -> Processor:
    values: dict[str, Any] = {
        "family": "qwen3_vl",
        "min_pixels": 1024,
        "max_pixels": 2**24,
        "video_min_pixels": 128 * 32 * 32,
        "video_max_pixels": 768 * 32 * 32,
        "frames": 2,
        "rotary": 8,
        "theta": 10000.0,
        "positions": 48,
        "resample": 3,
        "rescale": 1 / 255,
        "mean": HALF,
        "std": HALF,
        "patch": 16,
        "merge": 2,
        "image_token_id": 5,
        "video_token_id": 6,
        "texts": {"image": "<i>", "video": "<v>", "start": "<s>", "end": "</s>"},
    }
    made = Processor(**{**values, **changes})
    made.check()
    return made


@pytest.mark.parametrize(("count", "height", "width", "rows", "columns"), SIZES)
def test_frames_have_the_size_of_transformers(
    count: int, height: int, width: int, rows: int, columns: int
) -> None:
    assert qwen3_vl.frame_size(processor(), count, height, width) == (rows, columns)


@pytest.mark.parametrize(("count", "times"), [(1, ["0.0"]), (4, ["0.1", "0.6"]), (5, ["0.1", "0.6", "1.0"])])
def test_the_time_of_a_unit_is_the_middle_of_its_frames(count: int, times: list[str]) -> None:
    options = processor(video_min_pixels=1024, video_max_pixels=2**20)
    prepared = qwen3_vl.prepare_video(options, open_video([np.zeros((32, 64, 3), np.uint8)] * count, 4))
    assert prepared.text == "".join(f"<{time} seconds><s><v><v></s>" for time in times)
    assert [unit.shape for unit in prepared.units] == [(2, 32, 64, 3)] * len(times)
    assert [place.tolist() for place in prepared.places] == [[[0, 0], [0, 0], [0, 1]]] * len(times)
