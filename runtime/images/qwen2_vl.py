"""The geometry of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a picture is one unit, in whole tokens of any number.

Source: https://arxiv.org/abs/2409.12191. The results equal those of transformers' processor on Pillow, bit
for bit. Patches are in the order of tokens: those of a square that joins into one are neighbours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import GROUPS, PATCH_COS, PATCH_SIN, TABLE_ROWS, TABLE_WEIGHTS, WINDOWS
from ...exporter.vision.qwen2_vl import Processor
from .opening import Pixels
from .units import Floats, Ids, Prepared, UnitInputs, Values, normalized, unit_size
from .video import Video


def prepare(processor: Processor, pixels: Pixels) -> Prepared:
    """Return a picture in the size that the tower sees, with its text and the places of its tokens."""
    return prepared(processor, pixels, *resized(processor, pixels.shape[0], pixels.shape[1]))


def prepared(processor: Processor, pixels: Pixels, height: int, width: int) -> Prepared:
    """Return a picture in a size in whole tokens, with its text and the places of its tokens."""
    from PIL import Image

    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(processor.resample))
    token = processor.patch * processor.merge
    rows, columns = height // token, width // token
    places = np.stack([np.zeros(rows * columns, np.int64), *grid(rows, columns)])
    return Prepared([np.array(image, np.uint8)], processor.texts["image"] * (rows * columns), places=[places])


def prepare_video(processor: Processor, video: Video) -> Prepared:
    """Return a video in units of as many frames as a patch has; the last frame fills up the last of them.

    A unit later is a place later in time, or as many as ``tokens_per_second`` says.
    """
    frame = video.frames[0]
    of_frames = replace(
        processor, min_pixels=processor.video_min_pixels, max_pixels=processor.video_max_pixels
    )
    height, width = resized(of_frames, frame.shape[0], frame.shape[1])
    units = units_of_frames(processor, video, height, width)
    token = processor.patch * processor.merge
    row, column = grid(height // token, width // token)
    step = processor.tokens_per_second * processor.frames * video.seconds_per_frame or 1.0
    time = (np.arange(len(units), dtype=np.float32) * np.float32(step)).astype(np.int64)
    places = np.stack([np.repeat(time, len(row)), np.tile(row, len(units)), np.tile(column, len(units))])
    return Prepared(units, processor.texts["video"] * places.shape[1], places=[places])


def units_of_frames(processor: Processor, video: Video, height: int, width: int) -> list[Values]:
    """Return the frames in another size, as many together as a patch has; the last one is repeated."""
    from PIL import Image

    filter_ = Image.Resampling(processor.resample)
    values = [np.array(Image.fromarray(each).resize((width, height), filter_)) for each in video.frames]
    values += [values[-1]] * (-len(values) % processor.frames)
    return [np.stack(values[i : i + processor.frames]) for i in range(0, len(values), processor.frames)]


def resized(processor: Processor, height: int, width: int) -> tuple[int, int]:
    """Return height and width in whole tokens, near the aspect ratio and within the range of pixels.

    Halves round to even numbers, as in the training.
    """
    token = processor.patch * processor.merge
    rows, columns = round(height / token), round(width / token)
    pixels = rows * columns * token * token
    if pixels > processor.max_pixels:
        shrink = math.sqrt((height * width) / processor.max_pixels)
        rows = max(1, math.floor(height / shrink / token))
        columns = max(1, math.floor(width / shrink / token))
    elif pixels < processor.min_pixels:
        growth = math.sqrt(processor.min_pixels / (height * width))
        rows, columns = math.ceil(height * growth / token), math.ceil(width * growth / token)
    return rows * token, columns * token


def inputs(processor: Processor, unit: Values) -> UnitInputs:
    """Return the inputs of ``vision.onnx`` for a picture, or for frames that are a patch together."""
    merge, size = processor.merge, processor.patch
    height, width = unit_size(unit)
    rows, columns = height // size, width // size
    values = normalized(processor, unit)
    values = values[:, None] if unit.ndim == 3 else values
    cut = values.reshape(3, -1, rows // merge, merge, size, columns // merge, merge, size)
    cut = cut.transpose(2, 5, 3, 6, 0, 1, 4, 7)
    cut = np.broadcast_to(cut, (*cut.shape[:5], processor.frames, *cut.shape[6:]))  # a picture is repeated
    count = rows * columns
    row, column = (_in_order(axis, rows, columns, merge) for axis in grid(rows, columns))
    cos, sin = turns(processor, row, column)
    others: dict[str, npt.NDArray[Any]] = {PATCH_COS: cos, PATCH_SIN: sin}
    groups = {GROUPS: [np.arange(count)]}
    if processor.window:
        groups[WINDOWS] = _windows(processor, row, column)
    if processor.positions:
        entries = table(processor.positions, (row, rows), (column, columns))
        others[TABLE_ROWS], others[TABLE_WEIGHTS] = entries
    patches = np.ascontiguousarray(cut.reshape(count, -1), np.float32)
    return UnitInputs(patches, np.arange(count).reshape(-1, merge * merge), groups, others)


def grid(rows: int, columns: int) -> tuple[Ids, Ids]:
    """Return row and column of each place of a grid, row by row."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    return row, column


def _in_order(axis: Ids, rows: int, columns: int, merge: int) -> Ids:
    """Return numbers that are row by row in the order of tokens."""
    return axis.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3).reshape(-1)


def turns(processor: Processor, row: Ids, column: Ids) -> tuple[Floats, Floats]:
    """Return cosines and sines [patches, rotary / 2]: half of the frequencies turn with the row."""
    half = processor.rotary // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = (1.0 / np.float32(processor.theta) ** exponents).astype(np.float32)
    angles = [axis[:, None].astype(np.float32) * frequencies for axis in (row, column)]
    joined = np.concatenate(angles, axis=1)
    return np.cos(joined), np.sin(joined)


def _windows(processor: Processor, row: Ids, column: Ids) -> list[Ids]:
    """Return the patches of each window; those at the edges of the picture are smaller."""
    side = processor.window * processor.merge
    number = (row // side) * (int(column.max()) // side + 1) + column // side
    return [np.flatnonzero(number == window) for window in range(int(number.max()) + 1)]


def table(
    side: int, row: tuple[Ids, int], column: tuple[Ids, int], *, corners: bool = True
) -> tuple[Ids, Floats]:
    """Return entries of a table [side, side] and weights, [patches, 4], for bilinear interpolation.

    With ``corners`` the first and the last patch of an axis are on the first and the last entry, else the
    edges of patches and entries are. All of it is in float32.
    """
    (top, above), (left, beside) = (_taps(side, *axis, corners=corners) for axis in (row, column))
    entries = top[:, :, None] * side + left[:, None, :]
    weights = above[:, :, None] * beside[:, None, :]
    return entries.reshape(-1, 4), weights.reshape(-1, 4)


def _taps(side: int, axis: Ids, size: int, *, corners: bool) -> tuple[Ids, Floats]:
    """Return the two entries around each place of an axis of ``size`` patches, and their weights."""
    place = axis.astype(np.float32)
    if corners:
        place = place * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        half = np.float32(0.5)
        place = (place + half) * np.float32(side) / np.float32(size) - half
    floor = np.floor(place)
    offsets = np.arange(2)
    entries = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    weights = 1 - np.abs(place[:, None] - floor[:, None] - offsets.astype(np.float32))
    return entries, np.maximum(weights, 0).astype(np.float32)
