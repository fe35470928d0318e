"""Split the stacked weights of all experts, [experts, out, in], into linear layers of single experts."""

from __future__ import annotations

import abc

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..analysis.kernel_blocks import KernelBlocks, dequantized
from ..graph.edit import add_initializer
from ..graph.lazy import Array, lazy, shape_of, unpack_nibbles
from .write_mixture import ExpertWeights, LinearWeights

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 16  # the smallest block size of MatMulNBits


@dataclass(frozen=True)
class ExpertTensors(abc.ABC):
    """The weights of one layer of all experts.

    Args:
        name: prefix of the names of each expert's tensors.
        bias: [experts, out], or None.
    """

    name: str
    bias: ir.TensorProtocol | None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Number of experts, output size and input size."""

    @abc.abstractmethod
    def matrix(self, graph: ir.Graph, before: ir.Node, expert: int, rows: slice, stem: str) -> ir.Value:
        """Register the weight [in, out] of ``expert`` for the outputs ``rows``; names begin with ``stem``."""


class ExpertLayer:
    """A range of outputs of one layer of all experts.

    Args:
        tensors: the layer's weights.
        rows: the range of outputs.
        part: suffix of the names of the tensors.
    """

    def __init__(self, tensors: ExpertTensors, rows: slice = slice(None), part: str = "") -> None:
        self.tensors, self.rows, self.part = tensors, rows, part
        bias = tensors.bias
        self.bias = bias if bias is not None and bias.numpy()[:, rows].any() else None

    def of(self, expert: int, graph: ir.Graph, before: ir.Node) -> LinearWeights:
        """Register the weights of one expert and return them; nodes are inserted in front of ``before``."""
        stem, bias, rows = f"{self.tensors.name}.{expert}{self.part}", self.bias, self.rows
        matrix = self.tensors.matrix(graph, before, expert, rows, stem)
        if bias is None:
            return matrix, None
        size = _count(rows, shape_of(bias)[1])
        content = lazy(lambda: np.ascontiguousarray(bias.numpy()[expert, rows]), bias.dtype, (size,))
        return matrix, add_initializer(graph, f"{stem}.bias", content)


def split_experts(
    gate_up: ExpertTensors, parts: tuple[slice, slice], down: ExpertTensors, graph: ir.Graph, before: ir.Node
) -> list[ExpertWeights]:
    """Return the weights of each expert; ``parts`` are the outputs of gate and up in their common layer.

    Nodes are inserted in front of ``before``.
    """
    gate, up = (ExpertLayer(gate_up, *part) for part in zip(parts, (".gate", ".up"), strict=True))
    layers = gate, up, ExpertLayer(down)
    count = down.shape[0]
    return [ExpertWeights(*(layer.of(one, graph, before) for layer in layers)) for one in range(count)]


@dataclass(frozen=True)
class FloatExperts(ExpertTensors):
    """Float weights [experts, out, in], or [experts, in, out] if ``transposed``."""

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
    """4-bit or 8-bit weights [experts, out, packed in], with one scale per output or per block of inputs.

    ``block_size`` is 0 for one scale per output.
    """

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
            scales, points = self._expand_scales(expert, rows, (count, inputs // block))
        blocks = KernelBlocks(stem, packed, scales, points, count, inputs, self.bits, block)
        return dequantized(graph, before, blocks, axis=0)

    def _expand_scales(
        self, expert: int, rows: slice, shape: tuple[int, int]
    ) -> tuple[ir.LazyTensor, ir.LazyTensor | None]:
        """Return scales and zero points per block, [out, blocks], repeated from those per output."""
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
    """Return a block size for inputs with one scale: 128 to 16 if it divides them, else all inputs."""
    block = _LARGEST_BLOCK
    while block >= _SMALLEST_BLOCK:
        if inputs % block == 0:
            return block
        block //= 2
    return inputs
