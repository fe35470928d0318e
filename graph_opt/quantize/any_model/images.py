"""Read images as a model's input: resize, scale and normalise them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....errors import MissingExtraError, UsageError
from ....records import dataclass
from ...graph.lazy import Array

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp"})
LAYOUTS = ("auto", "nchw", "nhwc")
_OPEN_SIZE = 224  # pixels of a dynamic axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How pixels from 0 to 255 are converted to a model's input: (pixel * scale - mean) / std.

    Args:
        scale: factor of a pixel; 1/255 maps pixels to 0..1.
        mean: subtracted after scaling: one number, or one per channel.
        std: divisor after that: one number, or one per channel.
        layout: "nchw", "nhwc", or "auto" for the axis that has 1, 3 or 4 channels in the graph.
        size: (height, width) in pixels for dynamic axes.
        bgr: whether the channel order is BGR instead of RGB.

    Raises:
        UsageError: the layout is unknown, or a std is 0.
    """

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "auto"
    size: tuple[int, int] = (_OPEN_SIZE, _OPEN_SIZE)
    bgr: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(f"unknown image layout '{self.layout}'; the layouts are: {', '.join(LAYOUTS)}")
        if not all(self.std):
            raise UsageError("the std of images must not be 0")

    def describe(self, value: ir.Value) -> str:
        """Return a description of the conversion for an input."""
        channels, height, width, channels_last = _geometry(value, self)
        return (
            f"{channels} channel{'' if channels == 1 else 's'}{' BGR' if self.bgr else ''}, "
            f"{height} x {width}, {'NHWC' if channels_last else 'NCHW'}, pixel * {self.scale:.6g} "
            f"- {_numbers(self.mean)}, / {_numbers(self.std)}"
        )


def read_image(path: Path, value: ir.Value, options: ImageOptions) -> Array:
    """Return an image as a batch of one for ``value``.

    Raises:
        MissingExtraError: Pillow is not installed.
        UsageError: the file is not an image, the input does not take images, or mean or std have the wrong
            length.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("calibration on images", "Pillow", "images") from error
    channels, height, width, channels_last = _geometry(value, options)
    for what, numbers in (("mean", options.mean), ("std", options.std)):
        if len(numbers) not in (1, channels):
            raise UsageError(
                f"{what} has {len(numbers)} numbers for {channels} channels; give 1 or {channels}"
            )
    try:
        with Image.open(path) as image:
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            pixels = np.asarray(image.convert(mode).resize((width, height)), np.float32)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as an image: {error}") from error
    pixels = pixels.reshape(height, width, channels)
    if options.bgr and channels >= 3:
        pixels = pixels[..., [2, 1, 0, *range(3, channels)]]
    pixels = (pixels * options.scale - np.array(options.mean)) / np.array(options.std)
    batch = pixels[None] if channels_last else pixels.transpose(2, 0, 1)[None]
    kind = value.dtype or ir.DataType.FLOAT
    return np.ascontiguousarray(batch).astype(kind.numpy())


def _geometry(value: ir.Value, options: ImageOptions) -> tuple[int, int, int, bool]:
    """Return channels, height, width, and whether the layout is NHWC."""
    if value.shape is None or len(value.shape) != 4:
        raise UsageError(f"input {value.name}{value.shape} does not take images; it must have 4 axes")
    sizes = [size if isinstance(size, int) and size > 0 else None for size in value.shape]
    channels_last = options.layout == "nhwc" or (
        options.layout == "auto" and sizes[1] not in (1, 3, 4) and sizes[3] in (1, 3, 4)
    )
    channels, height, width = (sizes[3], *sizes[1:3]) if channels_last else sizes[1:]
    channels = channels or 3
    if channels not in (1, 3, 4):
        raise UsageError(f"input {value.name}{value.shape} has {channels} channels; images have 1, 3 or 4")
    return channels, height or options.size[0], width or options.size[1], channels_last


def _numbers(numbers: tuple[float, ...]) -> str:
    return "/".join(f"{number:g}" for number in numbers)
