"""Pictures of ViT and DeiT equal those of transformers' processors on Pillow, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_trocr import CASES, preprocessor
from trocr_golden import golden_path, pictures

from carryall.exporter.vision.vit import image_processor
from carryall.runtime.images import vit


@pytest.mark.parametrize("case", ["vit", "deit"])
def test_pixels_equal_those_of_transformers(case: str) -> None:
    encoder, decoder = CASES[case]
    processor = image_processor(preprocessor(case), Path(), {"encoder": encoder, "decoder": decoder})
    processor.check()
    side, edge = processor.tile // processor.patch, processor.patch
    for picture, expected in zip(pictures(), np.load(golden_path(case))["pixels"], strict=True):
        (unit,) = vit.prepare(processor, picture).units
        patches = vit.inputs(processor, unit).patches
        assert not patches[: processor.extra].any()
        cut = patches[processor.extra :].reshape(side, side, 3, edge, edge).transpose(2, 0, 3, 1, 4)
        np.testing.assert_array_equal(cut.reshape(3, processor.tile, processor.tile), expected)
