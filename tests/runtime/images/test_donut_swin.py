"""Pages of Donut equal those of transformers' processor on Pillow, bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from recorded_pictures import picture
from tiny_trocr import CASES, preprocessor
from trocr_golden import DONUTS, PAGES_PATH, golden_path, pictures

from carryall.errors import RequestError
from carryall.exporter.vision.donut_swin import Processor, image_processor
from carryall.runtime.images import donut_swin

RECORDED = json.loads(PAGES_PATH.read_text(encoding="utf-8"))


def processor_of(case: str) -> Processor:
    encoder, decoder = CASES[case]
    processor = image_processor(preprocessor(case), Path(), {"encoder": encoder, "decoder": decoder})
    processor.check()
    return processor


def values(processor: Processor, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the page that the tower sees, float32 [3, height, width]."""
    (unit,) = donut_swin.prepare(processor, pixels).units
    patches, edge = donut_swin.inputs(processor, unit).patches, processor.patch
    rows, columns = processor.height // edge, processor.width // edge
    cut = patches.reshape(rows, columns, 3, edge, edge).transpose(2, 0, 3, 1, 4)
    return np.ascontiguousarray(cut.reshape(3, processor.height, processor.width))


@pytest.mark.parametrize("case", DONUTS)
def test_pixels_equal_those_of_transformers(case: str) -> None:
    for pixels, expected in zip(pictures(), np.load(golden_path(case))["pixels"], strict=True):
        np.testing.assert_array_equal(values(processor_of(case), pixels), expected)


@pytest.mark.parametrize(("case", "size"), [(case, size) for case in DONUTS for size in RECORDED[case]])
def test_pages_of_other_sizes_equal_those_of_transformers(case: str, size: str) -> None:
    height, width = map(int, size.split("x"))
    page = values(processor_of(case), picture(height, width))
    assert hashlib.sha256(page.tobytes()).hexdigest() == RECORDED[case][size]


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (2, 60, "a picture with sides of 720 and 24 pixels has no pixels left on a page of 24 x 32"),
        (100, 20_000, "a picture of 20000 x 100 pixels is resized to 800000 x 4000 .* at most 64000000"),
    ],
)
def test_pictures_without_a_page_are_refused(height: int, width: int, message: str) -> None:
    processor = processor_of("donut")
    if height > 2:
        processor = dataclasses.replace(processor, height=4000, width=4000)
    with pytest.raises(RequestError, match=message):
        donut_swin.prepare(processor, np.zeros((height, width, 3), np.uint8))


def test_a_page_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="a page of 16384 x 16384 pixels; the limit is 16777216"):
        dataclasses.replace(processor_of("donut"), height=16_384, width=16_384).check()
