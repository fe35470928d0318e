"""Pictures of CLIP, SigLIP and SigLIP 2 equal those of transformers' processors on Pillow, bit for bit."""

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
from tiny_picture_encoders import CASES, PREPROCESSORS

from carryall.exporter.vision import clip as clip_options
from carryall.exporter.vision import siglip as siglip_options
from carryall.exporter.vision import siglip2 as siglip2_options
from carryall.runtime.images import clip, siglip, siglip2

RECORDED = Path(__file__).parents[2] / "corpora" / "images" / "picture_encoder_pixels.json"
PIXELS: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
OPTIONS: dict[str, Any] = {"clip": clip_options, "siglip": siglip_options, "siglip2": siglip2_options}
GEOMETRIES: dict[str, Any] = {"clip": clip, "siglip": siglip, "siglip2": siglip2}


def processor(kind: str) -> Any:
    options = OPTIONS[kind].image_processor(PREPROCESSORS[kind], Path(), CASES[kind])
    options.check()
    return options


@pytest.mark.parametrize("case", PIXELS, ids=lambda case: "{kind}-{height}x{width}".format(**case))
def test_pixels_equal_those_recorded_from_transformers(case: dict[str, Any]) -> None:
    kind = case["kind"]
    options, geometry = processor(kind), GEOMETRIES[kind]
    (unit,) = geometry.prepare(options, picture(case["height"], case["width"])).units
    patches = geometry.inputs(options, unit).patches
    if kind == "clip":
        assert not patches[0].any()
        patches = patches[1:]
    if kind != "siglip2":  # transformers cuts the pixels of the others into patches in the model
        side, edge = options.tile // options.patch, options.patch
        patches = patches.reshape(side, side, 3, edge, edge).transpose(2, 0, 3, 1, 4)
    assert hashlib.sha256(np.ascontiguousarray(patches).tobytes()).hexdigest() == case["sha256"]


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 2000), width=st.integers(1, 2000))
def test_a_picture_has_as_many_patches_as_are_allowed_and_its_aspect_ratio(height: int, width: int) -> None:
    options = processor("siglip2")
    tall, wide = siglip2.size(options, height, width)
    rows, columns = tall // options.patch, wide // options.patch
    assert (tall % options.patch, wide % options.patch) == (0, 0)
    assert 1 <= rows * columns <= options.most_patches
    weights = siglip2.position_weights(3, rows, columns)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)


def test_positions_of_the_table_s_own_size_are_its_entries() -> None:
    np.testing.assert_array_equal(siglip2.position_weights(4, 4, 4), np.eye(16))
