"""Random weights of 16 bits for carryall's own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from carryall.graph_opt.graph.lazy import Halves
from carryall.graph_opt.lower.products.half_products import half_tiles

Floats = npt.NDArray[np.float32]
KINDS = {ir.DataType.FLOAT16: (np.float16, 5), ir.DataType.BFLOAT16: (ml_dtypes.bfloat16, 6)}


@dataclass(frozen=True)
class HalfWeight:
    """A float32 matrix [inputs, outputs] whose values a 16-bit type holds."""

    values: Floats
    kind: ir.DataType
    bits: int = 16
    block: int = 1
    group_size: int = 0

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
            bits = self.values.astype(KINDS[self.kind][0]).view(np.uint16)
        return half_tiles(Halves(self.kind, lambda: bits), self.inputs, self.outputs, by_output=False).numpy()


def half_weight(kind: ir.DataType, inputs: int, outputs: int, seed: int) -> HalfWeight:
    """Return a weight of any finite values, subnormal ones too."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (inputs, outputs), np.uint16)
    values = bits.view(KINDS[kind][0]).astype(np.float32)
    return HalfWeight(np.where(np.isfinite(values) & (np.abs(values) < 1e5), values, np.float32(0.5)), kind)
