"""Random weights of 16 and 32 bits for carryall's own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from carryall.graph_opt.lower.products.half_products import float_tiles, split_tiles

Floats = npt.NDArray[np.float32]
HALF_KINDS = {ir.DataType.FLOAT16: (np.float16, 5), ir.DataType.BFLOAT16: (ml_dtypes.bfloat16, 6)}
KINDS = {**HALF_KINDS, ir.DataType.FLOAT: (np.float32, 9)}


@dataclass(frozen=True)
class HalfWeight:
    """A float32 matrix [inputs, outputs] whose values a type holds."""

    values: Floats
    kind: ir.DataType
    block: int = 1
    group_size: int = 0

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 32 if self.kind == ir.DataType.FLOAT else 16

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return int(self.values.shape[0])

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return int(self.values.shape[1])

    @property
    def offsets(self) -> int:
        """The attribute ``offsets``."""
        return KINDS[self.kind][1]

    def tiles(self) -> npt.NDArray[np.uint8]:
        """The weight in the layout of the kernels."""
        with np.errstate(invalid="ignore", over="ignore"):
            stored = self.values.astype(KINDS[self.kind][0])
        return float_tiles(lambda: stored, self.bits, self.inputs, self.outputs, by_output=False).numpy()


def half_weight(kind: ir.DataType, inputs: int, outputs: int, seed: int) -> HalfWeight:
    """Return a weight of any finite values, subnormal ones too."""
    word = np.uint32 if kind == ir.DataType.FLOAT else np.uint16
    bits = np.random.default_rng(seed).integers(0, np.iinfo(word).max, (inputs, outputs), word, endpoint=True)
    values = bits.view(KINDS[kind][0]).astype(np.float32)
    return HalfWeight(np.where(np.isfinite(values) & (np.abs(values) < 1e5), values, np.float32(0.5)), kind)


@dataclass(frozen=True)
class SplitWeight:
    """A float32 matrix [inputs, outputs] that is stored as one bfloat16 a float, or as two of them."""

    given: Floats
    bits: int = 32
    offsets: int = 10
    block: int = 1
    group_size: int = 0

    @property
    def values(self) -> Floats:
        """What the kernels read: floats rounded to one bfloat16 or the sum of two, ties away from zero."""
        high = _rounded(self.given)
        return high if self.bits == 16 else high + _rounded(self.given - high)

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return int(self.given.shape[0])

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return int(self.given.shape[1])

    def tiles(self) -> npt.NDArray[np.uint8]:
        """The weight in the layout of the kernels."""
        return split_tiles(lambda: self.given, self.bits, self.inputs, self.outputs, by_output=False).numpy()


def _rounded(x: Floats) -> Floats:
    """Round to 8 bits of mantissa by arithmetic, without the bits that the packer uses."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    steps = np.trunc(mantissa * 256 + np.copysign(0.5, mantissa))
    return np.asarray(np.ldexp(steps / 256, exponent), np.float32)
