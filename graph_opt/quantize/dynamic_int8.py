"""Dynamic 8-bit quantization: weights per column beforehand, activations per tensor at every run.

    MatMul(x, W) -> Cast(MatMulInteger(DynamicQuantizeLinear(x), Wq)) * (x_scale * W_scale)

Embedding and head become blocked int8 weights, as does every weight named in ``exclude``. One scale holds for
all rows of a run, so a sequence's last digits depend on what runs beside it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ...runtime.errors import GraphError
from ..edit import add_initializer, insert, nodes_of, remove_unused, replace, sole_consumer, weight
from ..lazy import Array, SharedComputation, lazy, shape_of
from ..passes.base import GraphPass
from .blockwise import BlockFormat, Floats
from .weight_only import WeightOnlyQuantizationPass

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_AFTER_HEAD = frozenset({"Add", "Cast", "Div", "Mul", "Reshape", "Tanh"})
_MAX_INPUTS = 1 << 16  # 2^16 products of a uint8 and an int8 still fit into an int32


class DynamicQuantizationPass(GraphPass):
    """Compute matrix products in 8-bit integers.

    Args:
        form: of the weights that are not computed so.
        exclude: weights whose products stay in float, for inputs that one scale cannot hold.
    """

    def __init__(self, form: BlockFormat, *, exclude: Collection[str] = ()) -> None:
        super().__init__()
        self.form = form
        self.exclude = frozenset(exclude)

    def rewrite(self, graph: ir.Graph) -> None:
        """Quantize every product with a weight, then the weights that are left."""
        inputs: dict[ir.Value, list[ir.Value]] = {}
        for node in nodes_of(graph, "MatMul"):
            x, source = node.inputs[0], node.inputs[1]
            tensor = weight(source)
            if x is None or source is None or tensor is None:
                continue
            if source.name in self.exclude or _is_head(node):
                continue
            if len(shape_of(tensor)) != 2 or tensor.dtype not in _FLOATS or shape_of(tensor)[0] > _MAX_INPUTS:
                self.refuse(node, f"weight {source.name} is no float matrix of at most {_MAX_INPUTS} inputs")
                continue
            if x not in inputs:
                inputs[x] = list(insert(node, "DynamicQuantizeLinear", [x], num_outputs=3).outputs)
            _lower(graph, node, inputs[x], str(source.name), tensor)
            if not source.uses():
                del graph.initializers[str(source.name)]
            self.fired += 1
        rest = WeightOnlyQuantizationPass(self.form)
        rest.rewrite(graph)
        self.fired += rest.fired
        self.refusals += rest.refusals


def _is_head(node: ir.Node) -> bool:
    """Return whether nothing but arithmetic lies between a product and an output of the graph."""
    value: ir.Value = node.outputs[0]
    while (reader := sole_consumer(value)) is not None and reader.op_type in _AFTER_HEAD:
        value = reader.outputs[0]
    return value.is_graph_output()


def _lower(graph: ir.Graph, node: ir.Node, x: list[ir.Value], name: str, tensor: ir.TensorProtocol) -> None:
    quantized, scale, zero = x
    values, scales = (add_initializer(graph, f"{name}.{what}", part) for what, part in _parts(tensor, name))
    product = insert(node, "MatMulInteger", [quantized, values, zero])
    floats = insert(node, "Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT.value})
    both = insert(node, "Mul", [scale, scales])
    result = insert(node, "Mul", [floats.outputs[0], both.outputs[0]])
    product.name = node.name
    replace(node.outputs[0], result.outputs[0])
    remove_unused(graph, node)


def _parts(tensor: ir.TensorProtocol, name: str) -> list[tuple[str, ir.LazyTensor]]:
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


def quantize_columns(weight: Array) -> tuple[Array, Floats]:
    """Quantize a matrix [in, out] to int8 values and one scale a column, [out].

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
