"""Random weights in the blocks of GGUF files, as tiles, and QuantizedLinear with them in NumPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from quantized_linear_reference import Floats, rounded
from tiny_gguf import ONE, random_rows

from carryall.graph_opt.lower.kernels import StoredForm
from carryall.graph_opt.lower.products.stored_tiles import FORMS
from carryall.providers.native.library import load
from carryall.providers.native.packing import tile_packer

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredWeight:
    """Blocks of one type [outputs, bytes of a row]."""

    library: Path
    kind: str
    rows: Bytes
    inputs: int

    @property
    def form(self) -> StoredForm:
        """How kernels read it."""
        return FORMS[self.kind]

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.rows)

    @property
    def bits(self) -> int:
        """The attribute ``bits``."""
        return self.form.bits

    @property
    def block(self) -> int:
        """The attribute ``block_size``."""
        return self.form.block

    @property
    def offsets(self) -> int:
        """The attribute ``offsets``."""
        return self.form.offsets

    @property
    def group_size(self) -> int:
        """The attribute ``group_size``."""
        return self.form.group

    def tiles(self) -> Bytes:
        """The weight in the layout of the kernels."""
        return tile_packer(self.library)(self.form, [self.rows], self.inputs)

    def floats(self) -> Floats:
        """The weights as the gguf package decodes them, [outputs, inputs]."""
        result: Floats = dequantize(self.rows, gguf.GGMLQuantizationType[self.kind])
        return result

    def read_rows(self) -> Floats:
        """The weights as the kernels read them."""
        tiles, result = self.tiles(), np.zeros((self.outputs, self.inputs), np.float32)
        sizes = (self.inputs, self.outputs, self.bits, self.block, self.offsets, self.group_size)
        for index, row in enumerate(result):
            load(self.library).carryall_read_row(
                ctypes.c_void_p(tiles.ctypes.data),
                *map(ctypes.c_int64, (*sizes, index)),
                ctypes.c_void_p(row.ctypes.data),
            )
        return result


def stored_weight(library: Path, kind: str, outputs: int, inputs: int, seed: int) -> StoredWeight:
    """Return random blocks: with random bytes if the gguf package cannot write the type."""
    rng = np.random.default_rng(seed)
    if kind in ONE:
        return StoredWeight(library, kind, random_rows(kind, (outputs, inputs), seed), inputs)
    floats = rng.standard_normal((outputs, inputs)).astype(np.float32) * 0.05
    return StoredWeight(library, kind, quantize(floats, gguf.GGMLQuantizationType[kind]), inputs)


def stored_linear(x: Floats, weight: StoredWeight, bias: Floats | None) -> npt.NDArray[np.float64]:
    """Return x @ W + bias in float64; int8 activations have a scale a block, in groups one for 64 inputs."""
    share = 64 if weight.group_size else weight.block
    parts = [rounded(x[:, first : first + share]) for first in range(0, x.shape[1], share)]
    held = np.concatenate([scales[:, None] * values.astype(np.float64) for scales, values in parts], axis=1)
    result: npt.NDArray[np.float64] = held @ weight.floats().T.astype(np.float64)
    return result if bias is None else result + bias
