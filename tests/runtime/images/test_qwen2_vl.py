"""Pictures of any size equal those of transformers' processor of Qwen2-VL on Pillow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_pictures import picture

from carryall.contract import PATCH_COS, TABLE_ROWS, TABLE_WEIGHTS, WINDOWS
from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD, HALF
from carryall.exporter.vision.qwen2_vl import Processor
from carryall.runtime.engine.requests.prompt_images import PromptImages
from carryall.runtime.images import qwen2_vl
from carryall.runtime.images.video import open_video

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "qwen2_vl_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))


def processor(least: int, most: int, patch: int, mean: str = "clip", **changes: Any) -> Processor:
    clip = mean == "clip"
    values: dict[str, Any] = {
        "family": "qwen2_vl",
        "min_pixels": least,
        "max_pixels": most,
        "frames": 2,
        "rotary": 8,
        "theta": 10000.0,
        "resample": 3,
        "rescale": 1 / 255,
        "mean": CLIP_MEAN if clip else HALF,
        "std": CLIP_STD if clip else HALF,
        "patch": patch,
        "merge": 2,
        "image_token_id": 5,
        "texts": {"image": "<|image_pad|>"},
    }
    return Processor(**{**values, **changes})


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "{least}-{most}-{patch}-{height}x{width}".format(**case)
)
def test_patches_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    options = processor(case["least"], case["most"], case["patch"], case["mean"])
    prepared = qwen2_vl.prepare(options, picture(case["height"], case["width"]))
    (unit,) = prepared.units
    assert unit.shape[:2] == (case["rows"] * case["patch"], case["columns"] * case["patch"])
    patches = qwen2_vl.inputs(options, unit).patches
    assert hashlib.sha256(patches.tobytes()).hexdigest() == case["sha256"]
    assert prepared.text.count("<|image_pad|>") == case["rows"] * case["columns"] // 4


def test_text_goes_on_behind_the_last_place_in_time() -> None:
    """As section 2.1 of the paper says; transformers 5.24 leaves time out of it."""
    texts = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    options = processor(
        64, 4096, 8, texts=texts, video_token_id=6, video_min_pixels=64, video_max_pixels=4096
    )
    options.check()
    video = open_video([np.zeros((16, 16, 3), np.uint8)] * 9, 2)
    prepared = qwen2_vl.prepare_video(options, video)
    (places,) = prepared.places
    assert places[0].tolist() == list(range(5))
    states = [(b"k", np.zeros((5, 4), np.float32))]
    images = PromptImages.of([7, *[6] * 5, 8], options.token_ids, states, prepared.places)
    assert images.positions is not None
    assert images.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 900), width=st.integers(1, 900), patch=st.sampled_from([8, 14, 16]),
       most=st.integers(4000, 200_000))  # fmt: skip
def test_any_picture_equals_transformers(height: int, width: int, patch: int, most: int) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    if max(height, width) > 200 * min(height, width):
        return
    theirs = module.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4000, "longest_edge": most}, patch_size=patch
    )
    expected = theirs.preprocess(picture(height, width))
    options = processor(4000, most, patch)
    (unit,) = qwen2_vl.prepare(options, picture(height, width)).units
    np.testing.assert_array_equal(qwen2_vl.inputs(options, unit).patches, expected["pixel_values"])


def test_halves_round_to_even_as_in_the_training() -> None:
    """1280 x 720 at 32 pixels a token: 22.5 rows are 22, not 23."""
    assert qwen2_vl.resized(processor(4096, 2**24, 16), 720, 1280) == (704, 1280)


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), window=st.integers(1, 5))
def test_windows_part_a_picture_of_any_grid(rows: int, columns: int, window: int) -> None:
    options = processor(1, 2**24, 2, window=window)
    inputs = qwen2_vl.inputs(options, np.zeros((rows * 4, columns * 4, 3), np.uint8))
    found = inputs.groups[WINDOWS]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(4 * rows * columns))
    assert len(found) == -(-rows // window) * -(-columns // window)
    assert max(map(len, found)) <= (2 * window) ** 2


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 24])
@pytest.mark.parametrize("side", [2, 6, 48])
def test_the_table_of_positions_is_interpolated_from_corner_to_corner(rows: int, side: int) -> None:
    options = processor(1, 2**24, 2, positions=side)
    others = qwen2_vl.inputs(options, np.zeros((rows * 4, 12, 3), np.uint8)).others
    entries, weights = others[TABLE_ROWS], others[TABLE_WEIGHTS]
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    place = (entries // side * weights).sum(axis=1)
    assert place.min() == 0
    assert place.max() == pytest.approx(side - 1, abs=1e-4)


def test_places_count_rows_and_columns_of_tokens() -> None:
    (places,) = qwen2_vl.prepare(processor(1, 2**24, 2), np.zeros((8, 12, 3), np.uint8)).places
    assert places is not None
    np.testing.assert_array_equal(places, [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])


def test_neighbours_in_the_order_of_tokens_are_a_square() -> None:
    """The rope of the first four patches is that of a square, not of a row."""
    options = processor(1, 2**24, 2, rotary=4)
    cos = qwen2_vl.inputs(options, np.zeros((8, 8, 3), np.uint8)).others[PATCH_COS]
    turns = np.rint(np.arccos(np.clip(cos[:4], -1, 1))).astype(int)
    np.testing.assert_array_equal(turns, [[0, 0], [0, 1], [1, 0], [1, 1]])
