"""Sizes of pictures of LFM2-VL equal those of transformers' processor, and pixels are at most 1 away."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from lfm2_pixels import PATCH, PIXELS_FILE, SIZES_FILE, SMALL, SMALL_SIZES
from recorded_pictures import picture

from carryall.exporter.image_processor import HALF
from carryall.exporter.vision.lfm2_vl import Processor
from carryall.runtime.images import lfm2_vl
from carryall.runtime.images.internvl import best_grid

CASES: list[Any] = json.loads(SIZES_FILE.read_text(encoding="utf-8"))
PIXELS = np.load(PIXELS_FILE)


def processor(**changes: Any) -> Processor:
    values: dict[str, Any] = {
        "family": "lfm2_vl",
        "tile": 512,
        "min_tiles": 2,
        "max_tiles": 10,
        "whole": True,
        "min_tokens": 64,
        "max_tokens": 256,
        "tolerance": 2.0,
        "positions": 16,
        "resample": 2,
        "rescale": 1 / 255,
        "mean": HALF,
        "std": HALF,
        "patch": 16,
        "merge": 2,
        "image_token_id": 5,
        "texts": {"image": "<i>", "start": "<s>", "end": "</s>", "whole": "<w>"},
    }
    made = Processor(**{**values, **changes})
    made.check()
    return made


def small(**changes: Any) -> Processor:
    return processor(
        patch=SMALL["encoder_patch_size"],
        tile=SMALL["tile_size"],
        min_tokens=SMALL["min_image_tokens"],
        max_tokens=SMALL["max_image_tokens"],
        tolerance=SMALL["max_pixels_tolerance"],
        **changes,
    )


def test_sizes_equal_those_recorded_from_transformers() -> None:
    options, cut = processor(), 0
    for height, width, rows, columns, shapes in CASES:
        assert lfm2_vl.fits(options, height, width) == (rows * columns == 1), (height, width)
        last = [edge // 16 for edge in lfm2_vl.whole_size(options, height, width)]
        assert last == shapes[-1], (height, width)
        if rows * columns > 1:
            cut += 1
            assert best_grid(height, width, 512, (2, 10)) == (columns, rows), (height, width)
            assert shapes[:-1] == [[32, 32]] * (rows * columns)
    assert 20 < cut < len(CASES) - 20


@pytest.mark.parametrize("size", SMALL_SIZES, ids=lambda size: "{}x{}".format(*size))
def test_pixels_are_at_most_1_away_from_those_of_torchvision(size: tuple[int, int]) -> None:
    prepared = lfm2_vl.prepare(small(), picture(*size))
    expected = [PIXELS[name] for name in PIXELS.files if name.startswith("{}x{}-".format(*size))]
    assert [unit.shape for unit in prepared.units] == [unit.shape for unit in expected]
    for unit, wanted in zip(prepared.units, expected, strict=True):
        away = np.abs(unit.astype(int) - wanted.astype(int))
        assert away.max() <= 1
        assert away.mean() < 0.05


def test_text_names_each_tile_and_the_whole_picture() -> None:
    tile = "<i>" * 4
    text = lfm2_vl.prepare(small(max_tiles=2), picture(50, 90)).text
    assert text == f"<s><|img_row_1_col_1|>{tile}<|img_row_1_col_2|>{tile}<w>{'<i>' * 6}</s>"
    assert lfm2_vl.prepare(small(), picture(32, 48)).text == f"<s>{'<i>' * 6}</s>"
    text = lfm2_vl.prepare(small(max_tiles=2, whole=False), picture(50, 90)).text
    assert text == f"<s><|img_row_1_col_1|>{tile}<|img_row_1_col_2|>{tile}</s>"


def test_patches_are_normalized_as_torchvision_rounds_it() -> None:
    (unit,) = lfm2_vl.prepare(small(), picture(32, 48)).units
    found = lfm2_vl.inputs(small(), unit).patches.reshape(4, 6, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4)
    expected = (unit.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    np.testing.assert_array_equal(found.reshape(32, 48, 3), expected)


@pytest.mark.parametrize(
    "changes", [{"tile": 40}, {"min_tiles": 11}, {"min_tokens": 300}, {"tolerance": 0.0}, {"positions": 0}]
)
def test_a_damaged_record_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        processor(**changes)
