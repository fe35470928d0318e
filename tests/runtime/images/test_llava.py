"""Tiles of LLaVA and LLaVA-NeXT equal those of transformers' processors on Pillow."""

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

from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD
from carryall.exporter.vision.llava import Processor
from carryall.runtime.images import llava, llava_next
from carryall.runtime.images.units import normalized

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "llava_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
TILE = 42
RESOLUTIONS = ((42, 84), (84, 42), (84, 84), (126, 42), (42, 126))


def processor(kind: str) -> Processor:
    return Processor(
        family="llava_next" if kind == "next" else "llava",
        tile=TILE,
        class_token=True,
        pads=kind == "padded",
        resolutions=RESOLUTIONS if kind == "next" else (),
        resample=3,
        rescale=1 / 255,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        patch=14,
        merge=1,
        image_token_id=5,
        texts={"image": "<image>"},
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{kind}-{height}x{width}".format(**case))
def test_tiles_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    options, family = processor(case["kind"]), llava_next if case["kind"] == "next" else llava
    prepared = family.prepare(options, picture(case["height"], case["width"]))
    values = np.ascontiguousarray([normalized(options, unit) for unit in prepared.units])
    assert values.shape == (case["tiles"], 3, TILE, TILE)
    rows, columns = prepared.grid
    assert case["tiles"] == rows * columns + (case["kind"] == "next")
    assert hashlib.sha256(values.tobytes()).hexdigest() == case["sha256"]


@settings(max_examples=100, deadline=None)
@given(height=st.integers(1, 400), width=st.integers(1, 400))
def test_rows_are_those_of_the_whole_picture_and_of_all_tiles_without_padding(
    height: int, width: int
) -> None:
    options = processor("next")
    prepared = llava_next.prepare(options, picture(height, width))
    assert prepared.rows is not None
    assert prepared.text.count("<image>") == len(prepared.rows)
    seen = prepared.rows[prepared.rows >= 0]
    assert len(np.unique(seen)) == len(seen)
    assert seen.max() < 9 * len(prepared.units)
    np.testing.assert_array_equal(seen[:9], np.arange(9))
    assert prepared.rows[-1] == -1


def test_a_tile_has_a_state_of_its_own_in_front_of_those_of_patches() -> None:
    inputs = llava.inputs(processor("clip"), picture(TILE, TILE))
    assert inputs.patches.shape == (10, 14 * 14 * 3)
    assert not inputs.patches[0].any()
    np.testing.assert_array_equal(inputs.merged[:, 0], np.arange(1, 10))
