"""The common part of dynamic and static int8 quantization: int8 weights with one scale per column."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import add_initializer, nodes_of, remove_unused, replace, sole_consumer, weight
from ...graph.lazy import Array, SharedComputation, lazy, shape_of
from ...passes.base import GraphPass
from ..algorithms.blockwise import BlockFormat, Floats
from .routers import is_router
from .weight_only import WeightOnlyQuantizationPass

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_AFTER_HEAD = frozenset({"Add", "Cast", "Div", "Mul", "Reshape", "Tanh"})
_MAX_INPUTS = 1 << 16  # the sum of 2^16 products of a uint8 and an int8 fits in an int32


class IntegerProductsPass(GraphPass):
    """Quantize inputs and weights of matrix products; all other weights get weight-only quantization.

    Args:
        form: format of the weights that are not multiplied in integers.
        exclude: weights whose products keep float inputs.
        overrides: other formats of weight-only weights by name; None keeps a weight float.
    """

    def __init__(
        self,
        form: BlockFormat,
        *,
        exclude: Collection[str] = (),
        overrides: Mapping[str, BlockFormat | None] | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        self.exclude = frozenset(exclude)
        self.overrides = dict(overrides or {})

    def rewrite(self, graph: ir.Graph) -> None:
        """Quantize every product with a weight, then the remaining weights."""
        inputs: dict[ir.Value, list[ir.Value]] = {}
        for node, x, source in weight_products(graph):
            tensor, name = source.const_value, str(source.name)
            if tensor is None or name in self.exclude:
                continue
            reason = _misfit(tensor, name) or self.misfit(x)
            if reason is not None:
                self.refuse(node, reason)
                continue
            if x not in inputs:
                inputs[x] = self.quantize_input(graph, node, x)
            parts = [
                add_initializer(graph, f"{name}.{what}", part) for what, part in lazy_columns(tensor, name)
            ]
            result = self.multiply(graph, node, inputs[x], parts)
            called = node.outputs[0].name
            replace(node.outputs[0], result)
            remove_unused(graph, node)
            result.name = called  # keeps the value comparable with the float model's
            if not source.uses():
                del graph.initializers[name]
            self.fired += 1
        rest = WeightOnlyQuantizationPass(self.form, overrides=self.overrides)
        rest.rewrite(graph)
        self.fired += rest.fired
        self.refusals += rest.refusals

    def misfit(self, x: ir.Value) -> str | None:
        """Return why a value cannot be quantized, None if it can."""
        return None

    @abc.abstractmethod
    def quantize_input(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> list[ir.Value]:
        """Quantize ``x`` in front of ``node``, once for all products that read it."""

    @abc.abstractmethod
    def multiply(self, graph: ir.Graph, node: ir.Node, x: list[ir.Value], parts: list[ir.Value]) -> ir.Value:
        """Insert the product in front of ``node`` and return its float result.

        Args:
            graph: the node's graph.
            node: the product to replace.
            x: the result of ``quantize_input``.
            parts: values [in, out] and scales [out] of the weight.
        """


def weight_products(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
    """Yield (product, input, weight) of every linear layer except the head and routers."""
    for node in nodes_of(graph, "MatMul"):
        x, source = node.inputs[0], node.inputs[1]
        if x is None or source is None or weight(source) is None:
            continue
        if not _is_head(node) and not is_router(node):
            yield node, x, source


def quantize_columns(weight: Array) -> tuple[Array, Floats]:
    """Quantize a matrix [in, out] to int8 values and one scale per column, [out].

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    matrix = np.asarray(weight, np.float32)
    largest = np.maximum(matrix.max(axis=0), -matrix.min(axis=0))
    if not np.isfinite(largest).all():
        raise GraphError("it holds NaN or infinity")
    scales: Floats = np.divide(largest, 127, dtype=np.float32)
    reciprocal = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return np.rint(matrix * reciprocal).astype(np.int8), scales


def lazy_columns(tensor: ir.TensorProtocol, name: str) -> list[tuple[str, ir.LazyTensor]]:
    """Return ("values", int8 [in, out]) and ("scales", [out]) of a float matrix, computed when written."""

    def compute() -> tuple[Array, ...]:
        try:
            return quantize_columns(tensor.numpy())
        except GraphError as error:
            raise GraphError(f"weight {name} cannot be quantized: {error}") from error

    shared, shape = SharedComputation(compute), shape_of(tensor)
    return [
        ("values", lazy(lambda: shared.part(0), ir.DataType.INT8, shape)),
        ("scales", lazy(lambda: shared.part(1), ir.DataType.FLOAT, shape[1:])),
    ]


def _misfit(tensor: ir.TensorProtocol, name: str) -> str | None:
    shape = shape_of(tensor)
    if len(shape) == 2 and tensor.dtype in _FLOATS and shape[0] <= _MAX_INPUTS:
        return None
    return f"weight {name} is not a float matrix with at most {_MAX_INPUTS} inputs"


def _is_head(node: ir.Node) -> bool:
    """Return whether only arithmetic is between a product and a graph output."""
    value: ir.Value = node.outputs[0]
    while (reader := sole_consumer(value)) is not None and reader.op_type in _AFTER_HEAD:
        value = reader.outputs[0]
    return value.is_graph_output()
