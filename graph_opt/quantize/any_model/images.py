"""Images as a model's input: resized to its shape, scaled, and normalized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....errors import MissingExtraError, UsageError
from ...graph.lazy import Array

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp"})
LAYOUTS = ("auto", "nchw", "nhwc")
_OPEN_SIZE = 224  # pixels of an axis whose size the graph leaves open


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How pixels from 0 to 255 become a model's input: (pixel * scale - mean) / std.

    Args:
        scale: factor of a pixel; 1/255 takes pixels to 0..1.
        mean: subtracted afterwards: one number, or one a channel.
        std: divided by afterwards: one number, or one a channel.
        layout: "nchw", "nhwc", or "auto": wherever the graph says 1, 3 or 4 channels.
        size: (height, width) for axes that the graph leaves open.
        bgr: blue first.

    Raises:
        UsageError: an unknown layout, or a std of 0.
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
            raise UsageError("the std that pixels are divided by is 0")

    def describe(self, value: ir.Value) -> str:
        """Return in words what is done for an input."""
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
        UsageError: the file is no image, or mean or std do not fit its channels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("calibrating on images", "Pillow", "images") from error
    channels, height, width, channels_last = _geometry(value, options)
    for what, numbers in (("mean", options.mean), ("std", options.std)):
        if len(numbers) not in (1, channels):
            raise UsageError(
                f"{len(numbers)} numbers of {what} for {channels} channels; give 1 or {channels}"
            )
    try:
        with Image.open(path) as image:
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            pixels = np.asarray(image.convert(mode).resize((width, height)), np.float32)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable image: {error}") from error
    pixels = pixels.reshape(height, width, channels)
    if options.bgr and channels >= 3:
        pixels = pixels[..., [2, 1, 0, *range(3, channels)]]
    pixels = (pixels * options.scale - np.array(options.mean)) / np.array(options.std)
    batch = pixels[None] if channels_last else pixels.transpose(2, 0, 1)[None]
    kind = value.dtype or ir.DataType.FLOAT
    return np.ascontiguousarray(batch).astype(kind.numpy())


def _geometry(value: ir.Value, options: ImageOptions) -> tuple[int, int, int, bool]:
    """Return channels, height, width, and whether channels come last."""
    if value.shape is None or len(value.shape) != 4:
        raise UsageError(f"input {value.name}{value.shape} takes no image")
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
