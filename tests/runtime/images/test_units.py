"""Units of Pixtral, InternVL and LLaVA-OneVision equal those of transformers' processors on Pillow."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from recorded_pictures import picture

from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD, HALF, ImageProcessor
from carryall.exporter.vision import internvl as internvl_record
from carryall.exporter.vision import llava_onevision as onevision_record
from carryall.exporter.vision import mistral3 as mistral3_record
from carryall.runtime.images import internvl, llava_onevision, mistral3
from carryall.runtime.images.units import joined, normalized, unit_key

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "tiles_pixels.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
TILE = 42
CLIP: dict[str, Any] = {
    "resample": 3,
    "rescale": 1 / 255,
    "mean": CLIP_MEAN,
    "std": CLIP_STD,
    "patch": 14,
    "image_token_id": 5,
    "texts": {"image": "<image>", "start": "<img>", "end": "</img>", "break": "<break>"},
}


def family(kind: str) -> tuple[ImageProcessor, ModuleType]:
    if kind == "pixtral":
        sizes: dict[str, Any] = {"longest_edge": 256, "rotary": 8, "theta": 10000.0, "ends": True, "merge": 2}
        return mistral3_record.Processor(family="mistral3", **sizes, **CLIP), mistral3
    if kind.startswith("internvl"):
        least, most = (2, 6) if kind.endswith("6") else (1, 12)
        tiles: dict[str, Any] = {"tile": TILE, "min_tiles": least, "max_tiles": most, "merge": 1}
        return internvl_record.Processor(family="internvl", **tiles, **CLIP), internvl
    sides = range(TILE, 5 * TILE, TILE)
    half = {**CLIP, "mean": HALF, "std": HALF, "merge": 1, "tile": TILE, "class_token": False}
    resolutions = tuple((height, width) for height in sides for width in sides)
    record = onevision_record.Processor(
        family="llava_onevision", most_tiles=9, resolutions=resolutions, **half
    )
    return record, llava_onevision


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{kind}-{height}x{width}".format(**case))
def test_units_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    options, module = family(case["kind"])
    prepare = module.prepare_several if case["kind"].endswith("several") else module.prepare
    prepared = prepare(options, picture(case["height"], case["width"]))
    values = [np.ascontiguousarray(normalized(options, unit)) for unit in prepared.units]
    rows, columns = prepared.grid
    whole = case["kind"] == "onevision" or rows * columns > 1
    assert len(values) == case["units"] == rows * columns + whole
    assert list(values[-1].shape[1:]) == case["last"]
    key = hashlib.sha256()
    for value in values:
        key.update(value.tobytes())
    assert key.hexdigest() == case["sha256"]
    rows = sum(len(module.inputs(options, unit).merged) for unit in prepared.units)
    expected = rows if prepared.rows is None else len(prepared.rows)
    assert prepared.text.count("<image>") == expected


def test_rows_of_pixtral_end_with_tokens_of_text() -> None:
    options, module = family("pixtral")
    text = module.prepare(options, picture(50, 80)).text
    assert text == "<image><image><image><break><image><image><image></img>"


def test_units_of_different_sizes_in_one_run_keep_their_patches_apart() -> None:
    options, module = family("pixtral")
    units = [module.prepare(options, picture(*size)).units[0] for size in ((50, 80), (20, 20))]
    feeds = joined([module.inputs(options, unit) for unit in units])
    np.testing.assert_array_equal((feeds["groups"] >= 0).sum(axis=1), [24, 4])
    np.testing.assert_array_equal(feeds["groups"].reshape(-1)[feeds["group_rows"]], np.arange(28))
    assert feeds["merged_patches"].max() == 27
    assert feeds["merged_patches"][-1].min() >= 24


def test_keys_of_units_know_their_shape() -> None:
    flat = np.zeros((30, 150, 3), np.uint8)
    assert unit_key(flat) != unit_key(flat.reshape(150, 30, 3))
