"""Patches of GLM-OCR equal those of transformers' processor on Pillow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from recorded_pictures import picture

from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD
from carryall.exporter.vision.glm_ocr import Processor
from carryall.runtime.images import glm_ocr

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "glm_ocr_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
PROCESSOR = Processor(
    family="glm_ocr",
    min_pixels=3136,
    max_pixels=50_176,
    frames=2,
    rotary=64,
    theta=10_000.0,
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
    prepared = glm_ocr.prepare(PROCESSOR, picture(case["height"], case["width"]))
    (unit,) = prepared.units
    assert unit.shape[:2] == (14 * case["rows"], 14 * case["columns"])
    assert prepared.text.count("<i>") == case["rows"] * case["columns"] // 4
    inputs = glm_ocr.inputs(PROCESSOR, unit)
    assert hashlib.sha256(inputs.patches.tobytes()).hexdigest() == case["sha256"]
