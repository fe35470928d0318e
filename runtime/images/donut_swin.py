"""The geometry of Donut (https://arxiv.org/abs/2111.15664): a picture in the middle of a page of one size.

The results equal those of transformers' processor on Pillow, bit for bit.
"""

from __future__ import annotations

import numpy as np

from ...errors import RequestError
from ...exporter.vision.donut_swin import Processor
from .opening import MOST_PIXELS, Pixels
from .units import Prepared, UnitInputs, Values, normalized, square_patches


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture on a page of zeros: its shorter side fits, then both sides do.

    Raises:
        RequestError: the picture is so long that it has too many pixels when its shorter side fits.
    """
    page = (processor.height, processor.width)
    if processor.turns and _is_turned(page, pixels.shape):
        pixels = np.rot90(pixels, 3)
    small = _fitted(processor, _with_shorter_side(processor, pixels, min(page)))
    whole = np.zeros((*page, 3), np.uint8)
    top, left = (page[0] - small.shape[0]) // 2, (page[1] - small.shape[1]) // 2
    whole[top : top + small.shape[0], left : left + small.shape[1]] = small
    return Prepared([whole], "")


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a page, all of whose patches are in order."""
    patches = square_patches(normalized(processor, unit), processor.patch)
    return UnitInputs(patches, np.arange(processor.rows)[:, None], {})


def _is_turned(page: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Return whether the longer side of a picture is not that of the page."""
    height, width = shape[:2]
    return (page[1] < page[0] and width > height) or (page[1] > page[0] and width < height)


def _with_shorter_side(processor: Processor, pixels: Pixels, edge: int) -> Values:
    height, width, _ = pixels.shape
    size = (int(edge * height / width), edge) if width <= height else (edge, int(edge * width / height))
    if size[0] * size[1] > MOST_PIXELS:
        raise RequestError(
            f"a picture of {width} x {height} pixels is resized to {size[1]} x {size[0]} by this model; at "
            f"most {MOST_PIXELS} pixels are supported; send a part of it"
        )
    return _resized(pixels, size, processor.resample)


def _fitted(processor: Processor, pixels: Values) -> Values:
    """Return a picture that is no larger than the page; the shorter side shrinks with the longer."""
    from PIL import Image

    height, width, _ = pixels.shape
    high, wide = min(height, processor.height), min(width, processor.width)
    if (high, wide) == (height, width):
        return pixels
    if height > width:
        wide = int(width * high / height)
    elif width > height:
        high = int(height * wide / width)
    if not (high and wide):
        raise RequestError(
            f"a picture with sides of {width} and {height} pixels has no pixels left on a page of "
            f"{processor.width} x {processor.height}; send a part of it"
        )
    return _resized(pixels, (high, wide), processor.resample or Image.Resampling.BICUBIC)


def _resized(pixels: Pixels, size: tuple[int, int], resample: int) -> Values:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.array(image.resize((size[1], size[0]), Image.Resampling(resample)), np.uint8)
