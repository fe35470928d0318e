"""Tiles and crops of Gemma 3, and patches of Gemma 4, equal those of transformers' processors on Pillow."""

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

from carryall.contract import TABLE_ROWS
from carryall.exporter.image_processor import HALF
from carryall.exporter.vision import gemma3 as records3
from carryall.exporter.vision import gemma4 as records4
from carryall.runtime.images import gemma3, gemma4
from carryall.runtime.images.units import normalized

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "gemma_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
COMMON: dict[str, Any] = {"rescale": 1 / 255, "image_token_id": 5}
POSITIONS = 256


def square(*, crops: bool) -> records3.Processor:
    return records3.Processor(
        family="gemma3",
        tile=32,
        crops=crops,
        min_crop=20,
        max_crops=4,
        crop_ratio=1.2,
        resample=2,
        mean=HALF,
        std=HALF,
        patch=8,
        merge=2,
        texts={"image": "<i>", "place": "<boi>", "end": "<eoi>"},
        **COMMON,
    )


def budget() -> records4.Processor:
    return records4.Processor(
        family="gemma4",
        max_tokens=70,
        rotary=8,
        theta=100.0,
        positions=POSITIONS,
        resample=3,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        patch=4,
        merge=3,
        texts={"image": "<i>", "start": "<boi>", "end": "<eoi>"},
        **COMMON,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{kind}-{height}x{width}".format(**case))
def test_pixels_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    seen = picture(case["height"], case["width"])
    if case["kind"] == "budget":
        processor = budget()
        (unit,) = gemma4.prepare(processor, seen).units
        inputs = gemma4.inputs(processor, unit)
        places = np.ascontiguousarray(inputs.others[TABLE_ROWS] - [0, POSITIONS], np.int64)
        assert len(inputs.patches) == case["units"]
        content = inputs.patches.tobytes() + places.tobytes()
    else:
        processor3 = square(crops=case["kind"] == "crops")
        units = gemma3.prepare(processor3, seen).units
        assert len(units) == case["units"]
        content = np.ascontiguousarray([normalized(processor3, unit) for unit in units]).tobytes()
    assert hashlib.sha256(content).hexdigest() == case["sha256"]


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 4000), width=st.integers(1, 4000))
def test_a_picture_fills_the_budget_of_tokens_and_never_exceeds_it(height: int, width: int) -> None:
    """So far as whole tokens can: one row or column more would exceed it, or distort the picture."""
    tall, wide = gemma4.resized(budget(), height, width)
    assert tall % 12 == wide % 12 == 0
    assert 1 <= tall * wide // 144 <= 70
    if min(tall, wide) > 12:
        scale = (70 * 144 / (height * width)) ** 0.5
        assert tall > scale * height - 12
        assert wide > scale * width - 12


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 300), width=st.integers(1, 300))
def test_crops_are_the_whole_picture(height: int, width: int) -> None:
    seen = picture(height, width)
    cut = gemma3.crops(square(crops=True), seen)
    assert not gemma3.crops(square(crops=False), seen)
    assert len(cut) in (0, 2, 3, 4)
    if cut:
        np.testing.assert_array_equal(np.concatenate(cut, axis=1 if width >= height else 0), seen)
