"""The geometry of GLM-OCR: that of Qwen2-VL, with another rule for pictures below a token.

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

from ...exporter.vision.glm_ocr import Processor
from . import qwen2_vl
from .opening import Pixels
from .qwen2_vl import inputs as inputs
from .units import Prepared


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size that the tower sees, with its text and the places of its tokens."""
    height, width = resized(processor, pixels.shape[0], pixels.shape[1])
    return qwen2_vl.prepared(processor, pixels, height, width)


def resized(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return height and width in whole tokens; a picture of less than a token is enlarged before."""
    token = processor.patch * processor.merge
    if height < token or width < token:
        scale = max(token / height, token / width)
        height, width = int(height * scale), int(width * scale)
    return qwen2_vl.resized(processor, height, width)
