"""Patches of PaddleOCR-VL equal those of transformers' processor on Pillow, and its table that of torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_pictures import picture

from carryall.contract import TABLE_ROWS, TABLE_WEIGHTS
from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD
from carryall.exporter.vision.paddleocr_vl import Processor
from carryall.runtime.images import paddleocr_vl

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "paddleocr_vl_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
PROCESSOR = Processor(
    family="paddleocr_vl",
    min_pixels=3136,
    max_pixels=50_176,
    frames=1,
    rotary=72,
    theta=10_000.0,
    positions=27,
    resample=3,
    rescale=1 / 255,
    mean=CLIP_MEAN,
    std=CLIP_STD,
    patch=14,
    merge=2,
    image_token_id=5,
    texts={"image": "<i>"},
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{height}x{width}".format(**case))
def test_patches_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    prepared = paddleocr_vl.prepare(PROCESSOR, picture(case["height"], case["width"]))
    (unit,) = prepared.units
    assert unit.shape[:2] == (14 * case["rows"], 14 * case["columns"])
    assert prepared.text.count("<i>") == case["rows"] * case["columns"] // 4
    inputs = paddleocr_vl.inputs(PROCESSOR, unit)
    assert hashlib.sha256(inputs.patches.tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (26, 28), (28, 54), (60, 2)])
def test_the_table_is_interpolated_between_the_centres_of_its_entries(grid: tuple[int, int]) -> None:
    """A table of its own places gives the places of the patches, within its edges."""
    rows, columns = grid
    inputs = paddleocr_vl.inputs(PROCESSOR, np.zeros((14 * rows, 14 * columns, 3), np.uint8))
    entries, weights = inputs.others[TABLE_ROWS], inputs.others[TABLE_WEIGHTS]
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    row, column = np.divmod(np.arange(rows * columns), columns)
    for found, place, size in ((entries // 27, row, rows), (entries % 27, column, columns)):
        expected = np.clip((place + 0.5) * 27 / size - 0.5, 0, 26)
        np.testing.assert_allclose((found * weights).sum(axis=1), expected, atol=1e-4)
