"""The geometry of Idefics3 and SmolVLM: a picture in tiles, followed by the whole picture in one tile.

Source: the paper of Idefics3, https://arxiv.org/abs/2408.12637. The results equal those of transformers'
processors on Pillow, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...contract import GROUPS, PATCH_POSITIONS
from ...exporter.vision.idefics3 import Processor
from .opening import Pixels
from .units import Prepared, UnitInputs, Values, merged_squares, normalized, square_patches
from .video import Video

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_LONGEST = 4096  # pixels of an edge, whatever the processor says


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in tiles, with its text."""
    cut, grid = tiles(processor, pixels)
    return Prepared(cut, prompt_text(processor, grid), grid=grid if any(grid) else (1, 1))


def prepare_video(processor: Processor, video: Video) -> Prepared:
    """Return a video as pictures of one tile each, in a text that tells their times, as SmolVLM2 knows it."""
    alone = replace(processor, longest_edge=processor.video_edge, splits=False)
    units = [tiles(alone, frame)[0][0] for frame in video.frames]
    minutes, seconds = divmod(int(video.duration), 60)
    text = (
        f"You are provided the following series of {_counted(len(units))} frames from a "
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02} [H:MM:SS] video.\n"
    )
    whole = prompt_text(processor, (0, 0))
    for number in range(len(units)):
        minutes, seconds = divmod(int(video.seconds(number)), 60)
        text += f"\nFrame from {minutes:02}:{seconds:02}:{whole}"
    return Prepared(units, f"{text}\n\n")


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _counted(count: int) -> str:
    """Return a number below 1000 in English words."""
    if count < len(_ONES):
        return _ONES[count]
    if count < 100:
        tens, ones = divmod(count, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(count, 100)
    return f"{_ONES[hundreds]} hundred" + (f" and {_counted(rest)}" if rest else "")


def tiles(processor: Processor, pixels: Pixels) -> tuple[list[Values], tuple[int, int]]:
    """Cut a picture into tiles.

    Args:
        processor: the options.
        pixels: uint8 [height, width, 3].

    Returns:
        The tiles by rows, then the whole picture as the last tile; and the numbers of rows and columns, both
        0 for a picture that is one tile.
    """
    from PIL import Image

    resample, edge = Image.Resampling(processor.resample), processor.tile
    height, width = _scaled(pixels.shape[0], pixels.shape[1], processor.longest_edge)
    image = Image.fromarray(pixels).resize((width, height), resample)
    if not processor.splits:
        return [_array(image.resize((edge, edge), resample))], (0, 0)
    height, width = _whole_tiles(height, width, edge)
    image = image.resize((width, height), resample)
    if height <= edge and width <= edge:
        return [_array(image)], (0, 0)
    large, rows, columns = _array(image), height // edge, width // edge
    cut = [
        large[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]
    # The whole picture is resized from the enlarged one, as in the training.
    return [*cut, _array(image.resize((edge, edge), resample))], (rows, columns)


def prompt_text(processor: Processor, grid: tuple[int, int]) -> str:
    """Return the text that stands for a picture of ``grid`` rows and columns of tiles in a prompt."""
    around, whole = processor.texts["around"], processor.texts["whole"]
    places = processor.texts["image"] * processor.tile_tokens
    rows, columns = grid
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"{around}<row_{row}_col_{column}>{places}"
        text += "\n"
    lead = "\n" if rows else ""
    return f"{text}{lead}{around}{whole}{places}{around}"


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a tile, which is one group; patches are row by row."""
    side = processor.tile // processor.patch
    return UnitInputs(
        square_patches(normalized(processor, unit), processor.patch),
        merged_squares(side, side, processor.merge),
        {GROUPS: [np.arange(side * side)]},
        {PATCH_POSITIONS: positions(processor)},
    )


def positions(processor: Processor) -> npt.NDArray[np.int64]:
    """Return the entry of the table of positions for each patch of a tile, [patches], row by row.

    Patches have fractional places in the tile, which fall between the places of the table. All of it is in
    float32, since a place on a border would fall elsewhere in float64.
    """
    table, side = processor.positions, processor.tile // processor.patch
    borders = np.arange(1 / table, 1.0, 1 / table).astype(np.float32)
    step = np.float32(1.0) / np.float32(side)
    places = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    entries = np.searchsorted(borders, places, side="right").astype(np.int64)
    return np.asarray(entries[:, None] * table + entries[None, :], np.int64).reshape(-1)


def _scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return height and width with the longest edge given, the other edge even and at least 1."""
    aspect = width / height
    if width >= height:
        height, width = int(longest / aspect), longest
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > _LONGEST:
        height, width = int(_LONGEST / aspect), _LONGEST
    elif height > width and height > _LONGEST:
        height, width = _LONGEST, int(_LONGEST * aspect)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return height and width as multiples of ``edge``, near the aspect ratio."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / aspect) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * aspect) / edge) * edge
    return height, width


def _array(image: PillowImage) -> Values:
    return np.array(image, np.uint8)
