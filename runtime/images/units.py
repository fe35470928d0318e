"""A picture in units: what attention of a tower does not leave, so that each is computed and kept alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import GROUP_ROWS, GROUPS, MERGED_PATCHES, PIXELS, WINDOW_ROWS, WINDOWS
from ...exporter.image_processor import ImageProcessor
from ...records import dataclass

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
# Pixels in the size that a tower sees: [height, width, 3], or [frames, height, width, 3] of a video.
Values = npt.NDArray[np.uint8]

_GROUPS = {GROUPS: GROUP_ROWS, WINDOWS: WINDOW_ROWS}


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A picture as a family prepares it.

    Args:
        units: uint8 of each unit: a tile, the whole picture, or frames that are a patch together.
        text: what stands for it in a prompt.
        rows: [tokens], for each token its row among the states of all units, one behind the other; None if
            they are in order. Negative numbers count from the end of the constant rows of the graph. With
            ``weights`` it is [tokens, k].
        places: [axes, tokens], places in time, height and width, of each run of tokens without text between;
            none if positions have one axis.
        weights: [tokens, k], the parts of each row in a token; None for one row each.
        grid: rows and columns of the tiles that the picture is cut into, beside a tile of the whole.
    """

    units: Sequence[Values]
    text: str
    rows: Ids | None = None
    places: Sequence[Ids] = ()
    weights: Floats | None = None
    grid: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class UnitInputs:
    """The inputs of ``vision.onnx`` for one unit.

    Args:
        patches: float32 [patches, channels * patch * patch].
        merged: [tokens, k], the patches of each token.
        groups: by name of the input, the patches of each group that attend to each other.
        others: further inputs, [patches, ...].
    """

    patches: Floats
    merged: Ids
    groups: Mapping[str, Sequence[Ids]]
    others: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def joined(units: Sequence[UnitInputs]) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a run for several units, one behind the other."""
    sizes = [len(unit.patches) for unit in units]
    firsts = np.cumsum([0, *sizes])[:-1].tolist()
    feeds: dict[str, npt.NDArray[Any]] = {
        PIXELS: np.concatenate([unit.patches for unit in units]),
        MERGED_PATCHES: np.concatenate(
            [unit.merged + first for unit, first in zip(units, firsts, strict=True)]
        ),
    }
    for name in units[0].others:
        feeds[name] = np.concatenate([unit.others[name] for unit in units])
    for name in units[0].groups:
        members = [
            group + first for unit, first in zip(units, firsts, strict=True) for group in unit.groups[name]
        ]
        feeds |= _grouped(name, members, sum(sizes))
    return feeds


def _grouped(name: str, members: Sequence[Ids], count: int) -> dict[str, Ids]:
    """Return groups [groups, longest] and the place of each of ``count`` patches in them."""
    longest = max(map(len, members))
    groups = np.full((len(members), longest), -1, np.int64)
    places = np.empty(count, np.int64)
    for number, group in enumerate(members):
        groups[number, : len(group)] = group
        places[group] = number * longest + np.arange(len(group))
    return {name: groups, _GROUPS[name]: places}


def unit_size(unit: Values) -> tuple[int, int]:
    """Return the height and the width of a unit."""
    return unit.shape[-3], unit.shape[-2]


def unit_key(unit: Values, salt: str = "") -> bytes:
    """Return 32 bytes that tell units of different shape, content or salt apart."""
    key = hashlib.blake2b(repr((unit.shape, salt)).encode(), digest_size=32)
    key.update(np.ascontiguousarray(unit).tobytes())
    return key.digest()


def normalized(processor: ImageProcessor, unit: Values) -> Floats:
    """Return the values that a tower sees, channels first, [3, ...] with the other axes of ``unit``.

    The 256 values of each channel are normalized once: float64 times the factor, then float32.
    """
    levels = (np.arange(256, dtype=np.float64) * processor.rescale).astype(np.float32)
    return _looked_up(unit, levels, np.array(processor.mean, np.float32), np.array(processor.std, np.float32))


def normalized_at_once(processor: ImageProcessor, unit: Values) -> Floats:
    """Return what ``normalized`` does, rounded as transformers' processors on torchvision round it.

    In place of the values, mean and deviation are rescaled, in float32.
    """
    levels, back = np.arange(256, dtype=np.float32), np.float32(1 / processor.rescale)
    mean, std = (np.array(each, np.float32) * back for each in (processor.mean, processor.std))
    return _looked_up(unit, levels, mean, std)


def _looked_up(unit: Values, levels: Floats, mean: Floats, std: Floats) -> Floats:
    table = (levels[:, None] - mean) / std
    return np.stack([table[unit[..., channel], channel] for channel in range(3)])


def square_patches(values: Floats, size: int) -> Floats:
    """Return the patches of [3, height, width] row by row, [patches, 3 * size * size]."""
    rows, columns = values.shape[1] // size, values.shape[2] // size
    cut = values.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut.reshape(rows * columns, -1), np.float32)


def merged_squares(rows: int, columns: int, merge: int) -> Ids:
    """Return the patches that each token joins, [tokens, merge * merge], all row by row."""
    numbers = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return numbers.transpose(0, 2, 1, 3).reshape(-1, merge * merge)
