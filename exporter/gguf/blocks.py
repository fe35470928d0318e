"""Split GGUF's blocks exactly into integer levels, scales and minima.

The ``gguf`` package decodes a block to floats. Each float is ``scale * level + minimum``, with one scale and
one minimum for every 16, 32 or 256 weights. A block whose scales are overwritten by 1 and whose minima by 0
decodes to its levels. A block whose levels are overwritten by 1 decodes to its scales, and one whose levels
are 0 to its minima.

Layout of the blocks: ggml/src/ggml-common.h of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...records import dataclass
from .block_types import BY_NAME

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.int8] | npt.NDArray[np.uint8]

_PIECE = 1 << 22  # weights decoded to floats at a time
_ZERO, _ONE, _FOUR, _EIGHT = b"\x00\x00", b"\x00\x3c", b"\x00\x44", b"\x00\x48"  # little-endian float16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The bytes to overwrite in a block of one GGUF type.

    Args:
        bits: bits of a level, 4 or 8: the smallest ONNX type for all levels.
        block_size: number of weights that share a scale.
        unit_scales: bytes by offset that make every scale 1 and every minimum 0.
        unit_levels: bytes by offset that make every level ``unit``, and every minimum 0.
        zero_levels: bytes by offset that make every level 0; None for types without minima.
        unit: the level that ``unit_levels`` decodes to; a power of two.
        scale_dtype: a dtype that holds all scales and minima exactly: float16 if a block has one scale,
            float32 if its parts multiply it by integers.
        kept_bits: masks by offset of the bits that ``unit_scales`` keeps; ``unit_levels`` keeps the others.
    """

    bits: int
    block_size: int = 32
    unit_scales: Mapping[int, bytes]
    unit_levels: Mapping[int, bytes]
    zero_levels: Mapping[int, bytes] | None = None
    unit: int = 1
    scale_dtype: npt.DTypeLike = np.float32
    kept_bits: Mapping[int, bytes] | None = None


_F16 = np.float16
_SCALES_4K = b"\x01" * 4 + b"\x00" * 4 + b"\x01" * 4  # eight 6-bit scales of 1, eight minima of 0
_SIGNS = b"\xff\xff\xff\x0f"  # the upper 4 of 32 bits are a scale
_SHIFTS = b"\xff\x8f" * 8  # bits 12 to 14 of 16 are a scale; the others, parts of grid numbers and of a shift

LAYOUTS: dict[str, BlockLayout] = {
    "Q4_0": BlockLayout(bits=4, scale_dtype=_F16, unit_scales={0: _ONE}, unit_levels={2: b"\x99" * 16}),
    "Q4_1": BlockLayout(
        bits=4,
        scale_dtype=_F16,
        unit_scales={0: _ONE + _ZERO},
        unit_levels={2: _ZERO + b"\x11" * 16},
        zero_levels={4: b"\x00" * 16},
    ),
    "Q5_0": BlockLayout(
        bits=8, scale_dtype=_F16, unit_scales={0: _ONE}, unit_levels={2: b"\xff" * 4 + b"\x11" * 16}
    ),
    "Q5_1": BlockLayout(
        bits=8,
        scale_dtype=_F16,
        unit_scales={0: _ONE + _ZERO},
        unit_levels={2: _ZERO + b"\x00" * 4 + b"\x11" * 16},
        zero_levels={4: b"\x00" * 20},
    ),
    "Q8_0": BlockLayout(bits=8, scale_dtype=_F16, unit_scales={0: _ONE}, unit_levels={2: b"\x01" * 32}),
    "Q2_K": BlockLayout(
        bits=4,
        block_size=16,
        unit_scales={0: b"\x01" * 16, 80: _ONE + _ZERO},
        unit_levels={16: b"\x55" * 64, 82: _ZERO},
        zero_levels={16: b"\x00" * 64},
    ),
    "Q3_K": BlockLayout(
        bits=4,
        block_size=16,
        unit_scales={96: b"\x11" * 8 + b"\xaa" * 4 + _ONE},
        unit_levels={0: b"\xff" * 32 + b"\x55" * 64},
    ),
    "Q4_K": BlockLayout(
        bits=4,
        unit_scales={0: _ONE + _ZERO + _SCALES_4K},
        unit_levels={2: _ZERO, 16: b"\x11" * 128},
        zero_levels={16: b"\x00" * 128},
    ),
    "Q5_K": BlockLayout(
        bits=8,
        unit_scales={0: _ONE + _ZERO + _SCALES_4K},
        unit_levels={2: _ZERO, 16: b"\x00" * 32 + b"\x11" * 128},
        zero_levels={16: b"\x00" * 160},
    ),
    "Q6_K": BlockLayout(
        bits=8,
        block_size=16,
        unit_scales={192: b"\x01" * 16 + _ONE},
        unit_levels={0: b"\x11" * 128 + b"\xaa" * 64},
    ),
    "IQ4_NL": BlockLayout(bits=8, scale_dtype=_F16, unit_scales={0: _ONE}, unit_levels={2: b"\x88" * 16}),
    "IQ4_XS": BlockLayout(
        bits=8,
        unit_scales={0: _ONE + b"\xaa\xaa" + b"\x11" * 4},
        unit_levels={8: b"\x88" * 128},
    ),
    "IQ3_XXS": BlockLayout(
        bits=8,
        unit_scales={0: _FOUR},
        unit_levels={2: b"\x00" * 64},
        unit=4,
        kept_bits={66: _SIGNS * 8},
    ),
    "IQ3_S": BlockLayout(bits=8, unit_scales={0: _ONE, 106: b"\x00" * 4}, unit_levels={2: b"\x00" * 104}),
    "IQ2_XXS": BlockLayout(
        bits=8,
        unit_scales={0: _EIGHT},
        unit_levels={2 + 8 * block: b"\x00" * 4 for block in range(8)},
        unit=8,
        kept_bits={6 + 8 * block: _SIGNS for block in range(8)},
    ),
    "IQ2_XS": BlockLayout(
        bits=8,
        block_size=16,
        unit_scales={0: _EIGHT, 66: b"\x00" * 8},
        unit_levels={2: b"\x00" * 64},
        unit=8,
    ),
    "IQ2_S": BlockLayout(
        bits=8,
        block_size=16,
        unit_scales={0: _EIGHT, 74: b"\x00" * 8},
        unit_levels={2: b"\x00" * 72},
        unit=8,
    ),
    # -1, 0 or 1, shifted by an eighth. Levels are eighths: the first of number 2 of the grid is 0, so its
    # level is the shift.
    "IQ1_S": BlockLayout(
        bits=8, unit_scales={0: _EIGHT}, unit_levels={2: b"\x02" * 32}, kept_bits={34: _SHIFTS}
    ),
    # The upper 4 of each 16 bits of the scales are a float16.
    "IQ1_M": BlockLayout(
        bits=8,
        block_size=16,
        unit_scales={48: b"\x00\x00\x00\x00\x00\x80\x00\x40"},
        unit_levels={0: b"\x02" * 32 + b"\x00" * 16},
    ),
    "MXFP4": BlockLayout(
        bits=8, scale_dtype=ml_dtypes.bfloat16, unit_scales={0: b"\x80"}, unit_levels={1: b"\x11" * 16}
    ),
    "NVFP4": BlockLayout(
        bits=8,
        block_size=16,
        scale_dtype=_F16,
        unit_scales={0: b"\x40" * 4},
        unit_levels={4: b"\x11" * 32},
    ),
    # Ternary: a level of 1 is the digit 2, four to a byte, or five in base 3.
    "TQ1_0": BlockLayout(
        bits=4, block_size=256, scale_dtype=_F16, unit_scales={52: _ONE}, unit_levels={0: b"\xff" * 52}
    ),
    "TQ2_0": BlockLayout(
        bits=4, block_size=256, scale_dtype=_F16, unit_scales={64: _ONE}, unit_levels={0: b"\xaa" * 64}
    ),
}


class Blocks(NamedTuple):
    """A matrix [out, in] as ``levels * scales + minima``.

    Args:
        levels: [out, in], int8 without minima, uint8 with them.
        scales: [out, in / block_size].
        minima: [out, in / block_size], or None.
        zero_points: always None.
    """

    levels: Levels
    scales: Floats
    minima: Floats | None
    zero_points: None = None


def take_apart(data: Bytes, type_name: str) -> Blocks:
    """Split rows of blocks into levels, scales and minima.

    Args:
        data: [out, bytes of a row].
        type_name: a key of ``LAYOUTS``.
    """
    kind = BY_NAME[type_name]
    rows = max(1, _PIECE * kind.bytes // (kind.weights * data.shape[1]))
    pieces = [
        _parts(data[start : start + rows], type_name, kind.bytes) for start in range(0, len(data), rows)
    ]
    levels, scales, minima = zip(*pieces, strict=True)
    layout = LAYOUTS[type_name]
    return Blocks(
        np.concatenate(levels),
        np.concatenate(scales),
        None if layout.zero_levels is None else np.concatenate(minima),
    )


def _parts(data: Bytes, type_name: str, block_bytes: int) -> tuple[Levels, Floats, Floats]:
    """Return levels, scales and minima of some rows; no minima for types without them."""
    layout = LAYOUTS[type_name]
    blocks, shape = data.reshape(-1, block_bytes), (len(data), -1)
    kept = layout.kept_bits or {}
    stored = np.int8 if layout.zero_levels is None else np.uint8
    first = np.s_[:: layout.block_size]
    levels = _decoded(blocks, type_name, layout.unit_scales, keep=kept).astype(stored).reshape(shape)
    scales = _decoded(blocks, type_name, layout.unit_levels, drop=kept).reshape(-1)[first]
    minima: Floats = np.empty(0, np.float32)
    if layout.zero_levels is not None:
        minima = _decoded(blocks, type_name, layout.zero_levels).reshape(-1)[first].reshape(shape).copy()
    return cast(Levels, levels), (scales / np.float32(layout.unit)).reshape(shape), minima


def _decoded(
    blocks: Bytes,
    type_name: str,
    patches: Mapping[int, bytes],
    *,
    keep: Mapping[int, bytes] | None = None,
    drop: Mapping[int, bytes] | None = None,
) -> Floats:
    """Return the decoded blocks with some bytes overwritten and some bits kept or cleared."""
    patched = blocks.copy()
    for offset, content in patches.items():
        patched[:, offset : offset + len(content)] = _row(content)
    for masks, invert in ((keep, False), (drop, True)):
        for offset, mask in (masks or {}).items():
            bits = ~_row(mask) if invert else _row(mask)
            patched[:, offset : offset + len(mask)] &= bits
    return decode(patched, type_name)


def decode(blocks: Bytes, type_name: str) -> Floats:
    """Return the floats of blocks [rows, bytes]; those of scales that are not finite are NaN or infinite."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(over="ignore", invalid="ignore"):
        result: Floats = dequantize(blocks, GGMLQuantizationType[type_name])
    return result


def _row(content: bytes | Sequence[int]) -> Bytes:
    return np.frombuffer(bytes(content), np.uint8)
