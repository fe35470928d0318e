"""Find scales of 4-bit blocks that are small multiples of one scale for a group of blocks.

The quantizer makes such scales (``graph_opt/quantize/algorithms/grouped.py``). In units of its group's scale
every weight is a signed byte: ``(value - zero point) * multiple``. So kernels add the integer products of a
whole group before they scale them. Any float16 scales with this property are found: the group's scale is
their greatest common divisor.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ...graph.half_scales import GROUP_SIZE, Widened
from ...graph.lazy import PARTS, Array, packed_bytes, shape_of, unpack_nibbles
from .blocked_weight import BlockedWeight

_SIZES = (256, 192, 128, 64)
_LARGEST = 127  # magnitude of a weight in units of its group's scale
_UNIT = 2.0**-24  # float16 values are multiples of it
_SAMPLE = 16  # outputs looked at first


class GroupedScales(NamedTuple):
    """Scales float32 [outputs, groups], multiples uint8 [outputs, blocks], and the inputs of a group."""

    scales: Array
    multiples: Array
    group_size: int


def group_size(weight: BlockedWeight) -> int:
    """Return the inputs of the groups of a weight, 0 if its blocks have no common scales."""
    if weight.bits != 4:
        return 0
    if (stated := _stated_size(weight.scales)) is not None:
        return stated
    scales, zeros = _scales_and_zeros(weight)
    for size in _SIZES:
        blocks = size // weight.block_size
        if blocks < 2 or size % weight.block_size:
            continue
        if all(_split(scales[:end], zeros[:end], blocks) is not None for end in (_SAMPLE, None)):
            return size
    return 0


def _stated_size(scales: ir.TensorProtocol) -> int | None:
    """Return the size that scales state which are not computed yet; None if reading them costs little."""
    if isinstance(scales, Widened):
        scales = scales.half
    if not isinstance(scales, ir.LazyTensor):
        return None
    if (parts := scales.meta.get(PARTS)) is not None:
        sizes = {_stated_size(part) for part in parts}
        return sizes.pop() if len(sizes) == 1 else 0
    return int(scales.meta.get(GROUP_SIZE, 0))


def grouped_scales(weight: BlockedWeight, size: int) -> GroupedScales:
    """Return the scales of a weight whose ``group_size`` is ``size``.

    Raises:
        ValueError: its scales are not multiples of common ones.
    """
    parts = _split(*_scales_and_zeros(weight), size // weight.block_size)
    if parts is None:
        raise ValueError(f"the scales of {weight.stem} are not multiples of one scale for {size} inputs")
    return GroupedScales(*parts, size)


def _scales_and_zeros(weight: BlockedWeight) -> tuple[Array, Array]:
    """Return float32 scales and uint8 zero points, [outputs, blocks]."""
    scales = weight.scales.numpy()
    outputs_first = np.ascontiguousarray(scales.T) if weight.axis == 0 else scales
    if weight.zero_points is None:
        return outputs_first, np.full(outputs_first.shape, 8, np.uint8)
    zeros = unpack_nibbles(packed_bytes(weight.zero_points), shape_of(weight.zero_points))
    return outputs_first, np.ascontiguousarray(zeros.T) if weight.axis == 0 else zeros


def _split(scales: Array, zeros: Array, blocks: int) -> tuple[Array, Array] | None:
    """Return the scales of groups and the multiples of blocks, None if there are none."""
    units = scales.astype(np.float32, copy=False) * np.float32(1 / _UNIT)  # exact
    kind = np.int32 if units.max(initial=0) < 2**31 else np.int64
    with np.errstate(invalid="ignore"):  # what is no integer differs from it
        integers = units.astype(kind)
    if bool((integers != units).any()) or int(integers.min(initial=0)) < 0:
        return None
    missing = -scales.shape[1] % blocks
    if missing:
        integers = np.pad(integers, ((0, 0), (0, missing)))
    whole = integers.reshape(len(scales), -1, blocks)
    # Faster than ``np.gcd.reduce`` along the last axis.
    divisors: Array = functools.reduce(np.gcd, (whole[..., i] for i in range(blocks)))
    multiples: Array = (whole // np.maximum(divisors, 1)[..., None]).reshape(len(scales), -1)[
        :, : scales.shape[1]
    ]
    if (multiples > _LARGEST).any() or (multiples * np.maximum(zeros, 15 - zeros) > _LARGEST).any():
        return None
    return (divisors * _UNIT).astype(np.float32), multiples.astype(np.uint8)
