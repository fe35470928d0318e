"""Quantized arithmetic in NumPy integers, implemented from the standard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def conv_sums(
    x: npt.NDArray[Any],
    w: npt.NDArray[Any],
    *,
    x_zero: int = 0,
    w_zero: int = 0,
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Integers:
    """Return sums of (x - x_zero) * (w - w_zero) over windows [n, c, ...]; padding adds 0."""
    rank = x.ndim - 2
    shifted = np.pad(
        x.astype(np.int64) - x_zero, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    )
    kernel = w.astype(np.int64) - w_zero
    spans = [(size - 1) * step + 1 for size, step in zip(w.shape[2:], dilations, strict=True)]
    sizes = [
        (total - span) // stride + 1
        for total, span, stride in zip(shifted.shape[2:], spans, strides, strict=True)
    ]
    result = np.zeros((len(x), len(w), *sizes), np.int64)
    inputs, outputs = w.shape[1], len(w) // groups
    for group in range(groups):
        part = shifted[:, group * inputs : (group + 1) * inputs]
        own = slice(group * outputs, (group + 1) * outputs)
        for place in itertools.product(*map(range, w.shape[2:])):
            window = tuple(
                slice(at * step, at * step + (size - 1) * stride + 1, stride)
                for at, step, size, stride in zip(place, dilations, sizes, strides, strict=True)
            )
            taps = kernel[own].reshape(outputs, inputs, -1)[:, :, np.ravel_multi_index(place, w.shape[2:])]
            index: tuple[Any, ...] = (..., *window)
            seen = part[index]
            result[:, own] += np.einsum("nc...,oc->no...", seen, taps)
    return result


def dynamic_levels(x: Floats) -> tuple[npt.NDArray[np.uint8], np.float32, int]:
    """Return levels, scale and zero point as DynamicQuantizeLinear does."""
    low, high = np.float32(min(0, x.min())), np.float32(max(0, x.max()))
    scale = np.float32((high - low) / np.float32(255))
    zero = int(np.clip(np.rint(-low / scale), 0, 255)) if scale else 0
    levels = np.rint(x / scale) + zero if scale else np.zeros_like(x)
    return np.clip(levels, 0, 255).astype(np.uint8), scale, zero


def levels_of(x: npt.NDArray[Any], scale: float | np.float32, zero: int, low: int, high: int) -> Integers:
    """Return levels as QuantizeLinear does, with ties to even."""
    levels: Integers = np.clip(np.rint(x / scale) + zero, low, high).astype(np.int64)
    return levels
