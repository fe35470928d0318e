"""The weights of all experts in one tensor, [experts, out, in], and those of one expert as a linear layer."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..analysis.kernel_blocks import KernelBlocks, dequantized
from ..graph.edit import add_initializer
from ..graph.lazy import Array, lazy, shape_of, unpack_nibbles
from .write_mixture import LinearWeights

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 16  # of MatMulNBits


@dataclass(frozen=True)
class ExpertTensors(abc.ABC):
    """The weights of one layer of all experts.

    Args:
        name: what the tensors of one expert are named after.
        bias: [experts, out], or None.
    """

    name: str
    bias: ir.TensorProtocol | None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Experts, out and in."""

    @abc.abstractmethod
    def matrix(self, graph: ir.Graph, before: ir.Node, expert: int, rows: slice, stem: str) -> ir.Value:
        """Return the weight [in, out] of an expert, of some of its outputs."""


class ExpertLayer:
    """Some outputs of one layer of all experts.

    Args:
        tensors: their weights.
        rows: which outputs.
        part: what is added to the name of their tensors.
    """

    def __init__(self, tensors: ExpertTensors, rows: slice = slice(None), part: str = "") -> None:
        self.tensors, self.rows, self.part = tensors, rows, part
        bias = tensors.bias
        self.bias = bias if bias is not None and bias.numpy()[:, rows].any() else None

    def of(self, expert: int, graph: ir.Graph, before: ir.Node) -> LinearWeights:
        """Register one expert's layer; nodes are inserted in front of ``before``."""
        stem, bias, rows = f"{self.tensors.name}.{expert}{self.part}", self.bias, self.rows
        matrix = self.tensors.matrix(graph, before, expert, rows, stem)
        if bias is None:
            return matrix, None
        size = _count(rows, shape_of(bias)[1])
        content = lazy(lambda: np.ascontiguousarray(bias.numpy()[expert, rows]), bias.dtype, (size,))
        return matrix, add_initializer(graph, f"{stem}.bias", content)


@dataclass(frozen=True)
class FloatExperts(ExpertTensors):
    """Weights as they are, [experts, out, in]; [experts, in, out] where ``transposed``."""

    tensor: ir.TensorProtocol
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, out and in."""
        experts, outputs, inputs = shape_of(self.tensor)
        return (experts, inputs, outputs) if self.transposed else (experts, outputs, inputs)

    def matrix(self, graph: ir.Graph, before: ir.Node, expert: int, rows: slice, stem: str) -> ir.Value:
        """Return the weight [in, out] of an expert, of some of its outputs."""
        tensor, (_, outputs, inputs) = self.tensor, self.shape
        transposed = self.transposed

        def content() -> Array:
            one = tensor.numpy()[expert]
            return np.ascontiguousarray(one[:, rows] if transposed else one[rows].T)

        shape = (inputs, _count(rows, outputs))
        return add_initializer(graph, f"{stem}.weight", lazy(content, tensor.dtype, shape))


@dataclass(frozen=True)
class BlockedExperts(ExpertTensors):
    """Weights of 4 or 8 bits, [experts, out, bytes of in], with scales a column or a block of one."""

    packed: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    bits: int
    block_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, out and in."""
        experts, outputs, inner = shape_of(self.packed)
        return experts, outputs, inner * 8 // self.bits

    def matrix(self, graph: ir.Graph, before: ir.Node, expert: int, rows: slice, stem: str) -> ir.Value:
        """Return the weight [in, out] of an expert, of some of its outputs."""
        _, outputs, inputs = self.shape
        count = _count(rows, outputs)
        block = self.block_size or _block_for(inputs)

        def bytes_of(tensor: ir.TensorProtocol, width: int) -> ir.LazyTensor:
            def content() -> Array:
                return np.ascontiguousarray(tensor.numpy()[expert, rows])

            return lazy(content, tensor.dtype, (count, width))

        packed = bytes_of(self.packed, shape_of(self.packed)[2])
        if self.block_size:
            scales = bytes_of(self.scales, shape_of(self.scales)[2])
            points = self.zero_points and bytes_of(self.zero_points, shape_of(self.zero_points)[2])
        else:
            scales, points = self._spread(expert, rows, (count, inputs // block))
        blocks = KernelBlocks(stem, packed, scales, points, count, inputs, self.bits, block)
        return dequantized(graph, before, blocks, axis=0)

    def _spread(
        self, expert: int, rows: slice, shape: tuple[int, int]
    ) -> tuple[ir.LazyTensor, ir.LazyTensor | None]:
        """Return scales and zero points of whole columns, [out, blocks], once a block."""
        scales, points, bits = self.scales, self.zero_points, self.bits
        width = -(-shape[1] * bits // 8)

        def spread_scales() -> Array:
            return np.repeat(scales.numpy()[expert, rows].reshape(-1, 1), shape[1], axis=1)

        spread = lazy(spread_scales, scales.dtype, shape)
        if points is None:
            return spread, None
        source = points

        def spread_points() -> Array:
            raw = source.numpy()[expert]
            if bits == 4:
                each = unpack_nibbles(raw, (2 * raw.size,))
                raw = each | (each << np.uint8(4))
            return np.repeat(raw[: self.shape[1]][rows].reshape(-1, 1), width, axis=1)

        return spread, lazy(spread_points, ir.DataType.UINT8, (shape[0], width))


def _count(rows: slice, size: int) -> int:
    return len(range(*rows.indices(size)))


def _block_for(inputs: int) -> int:
    """Return the block that a column of one scale is cut in: one that kernels take, where one fits."""
    block = _LARGEST_BLOCK
    while block >= _SMALLEST_BLOCK:
        if inputs % block == 0:
            return block
        block //= 2
    return inputs
