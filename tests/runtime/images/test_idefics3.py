"""Tiles of Idefics3 equal those of transformers' processor on Pillow."""

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

from carryall.exporter.vision.idefics3 import Processor
from carryall.runtime.images import idefics3
from carryall.runtime.images.opening import Pixels

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "idefics3_tiles.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
TEXTS = {"image": "<image>", "around": "<fake_token_around_image>", "whole": "<global-img>"}


def processor(longest: int, tile: int, *, split: bool = True, res: int = 1, **changes: Any) -> Processor:
    values: dict[str, Any] = {
        "family": "idefics3",
        "longest_edge": longest,
        "tile": tile,
        "splits": split,
        "resample": res,
        "rescale": 1 / 255,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "patch": 8,
        "merge": 2,
        "positions": tile // 8,
        "image_token_id": 5,
        "texts": TEXTS,
    }
    return Processor(**{**values, **changes})


def pixel_values(options: Processor, pixels: Pixels) -> np.ndarray[Any, Any]:
    """The tiles as transformers returns them, float32 [tiles, 3, tile, tile]."""
    cut, _ = idefics3.tiles(options, pixels)
    side, size = options.tile // options.patch, options.patch
    values = np.stack([idefics3.inputs(options, tile).patches for tile in cut])
    apart = values.reshape(-1, side, side, 3, size, size).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(apart.reshape(-1, 3, options.tile, options.tile))


@pytest.mark.long
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "{longest}-{tile}-{split}-{res}-{height}x{width}".format(**case)
)
def test_tiles_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    options = processor(case["longest"], case["tile"], split=case["split"], res=case["res"])
    pixels = picture(case["height"], case["width"])
    cut, grid = idefics3.tiles(options, pixels)
    assert (len(cut), grid) == (case["tiles"], (case["rows"], case["cols"]))
    assert hashlib.sha256(pixel_values(options, pixels).tobytes()).hexdigest() == case["sha256"]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 500), width=st.integers(1, 500), tile=st.sampled_from([32, 48, 64]),
       longest=st.integers(16, 400), split=st.booleans())  # fmt: skip
def test_any_picture_gives_whole_tiles_and_as_many_places(
    height: int, width: int, tile: int, longest: int, split: bool
) -> None:
    options = processor(longest, tile, split=split)
    cut, (rows, columns) = idefics3.tiles(options, picture(height, width))
    assert {part.shape for part in cut} == {(tile, tile, 3)}
    assert len(cut) == rows * columns + 1
    text = idefics3.prompt_text(options, (rows, columns))
    assert text.count(TEXTS["image"]) == len(cut) * options.tile_tokens


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 900), width=st.integers(1, 900), tile=st.sampled_from([32, 64, 96]),
       longest=st.integers(32, 600))  # fmt: skip
def test_any_picture_equals_transformers(height: int, width: int, tile: int, longest: int) -> None:
    module = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    theirs = module.Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": tile}
    )
    pixels = picture(height, width)
    expected = np.asarray(theirs.preprocess(pixels)["pixel_values"])[0]
    np.testing.assert_array_equal(pixel_values(processor(longest, tile), pixels), expected)


def test_a_picture_of_several_tiles_has_the_prompt_of_the_paper() -> None:
    options = processor(64, 16)
    one = "<image>"
    assert idefics3.prompt_text(options, (0, 0)) == (
        f"<fake_token_around_image><global-img>{one}<fake_token_around_image>"
    )
    assert idefics3.prompt_text(options, (1, 2)) == (
        f"<fake_token_around_image><row_1_col_1>{one}<fake_token_around_image><row_1_col_2>{one}\n"
        f"\n<fake_token_around_image><global-img>{one}<fake_token_around_image>"
    )


@pytest.mark.parametrize("side", [1, 2, 3, 7, 27, 64])
@pytest.mark.parametrize("table", [1, 2, 3, 7, 27, 64])
def test_a_tile_as_large_as_the_table_takes_its_entries_in_order(side: int, table: int) -> None:
    entries = idefics3.positions(processor(64, 8 * side, positions=table, merge=1))
    assert entries.min() == 0
    assert entries.max() < table * table
    assert (np.diff(entries.reshape(side, side), axis=1) >= 0).all()
    if side == table:
        np.testing.assert_array_equal(entries, np.arange(side * side))


def test_merged_patches_are_those_of_a_square() -> None:
    rows = idefics3.inputs(processor(64, 32), np.zeros((32, 32, 3), np.uint8)).merged
    np.testing.assert_array_equal(rows, [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
