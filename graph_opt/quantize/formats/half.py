"""Convert a graph to fp16 or bf16: weights, products, attention and the KV cache.

Nodes that depend on the embedding are computed in 16 bits. Rope tables and masks do not depend on it and
stay fp32, as do nodes after the head. Norms and softmax have 16-bit inputs and outputs and compute in fp32
(``stash_type``, ``softmax_precision``). Reductions, powers, exponentials, and values measured beyond the
type's range stay fp32 between casts. P. Micikevicius et al., "Mixed Precision Training",
https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from ....contract import is_past, is_present
from ....errors import GraphError
from ...graph.edit import insert, nodes_of, shared_constant, weight
from ...graph.lazy import Array, lazy, shape_of
from .half_pass import LARGEST, HalfPass

_FLOAT = ir.DataType.FLOAT
_COMPUTING = frozenset({"Attention", "Gemm", "MatMul"})
_MOVING = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
)
_FOLLOWING = _MOVING | {
    *("Add", "Gelu", "Mul", "Neg", "Relu", "Sigmoid", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    *("LayerNormalization", "RMSNormalization", "RotaryEmbedding", "QuantizeLinear", "DequantizeLinear"),
}
_AFTER_HEAD = frozenset({"Add", "Div", "Mul", "Reshape", "Tanh"})
_MASK = 3  # index of Attention's mask input


class HalfPrecisionPass(HalfPass):
    """Compute in 16 bits what can be, and store those weights so, lazily. ``logits`` stay fp32.

    Args:
        dtype: FLOAT16 or BFLOAT16.
        keep_float: names of values beyond the type's range, found by ``half_range.too_large``.

    Raises:
        UsageError: ``dtype`` is another type.
    """

    def __init__(self, dtype: ir.DataType, *, keep_float: Collection[str] = ()) -> None:
        super().__init__(dtype, keep_float=keep_float)
        self._half: set[ir.Value] = set()

    def rewrite(self, graph: ir.Graph) -> None:
        """Select the nodes to convert, change their types and insert casts, unless the graph is 16-bit."""
        if is_half(graph):
            return
        self._half = set()
        chosen = self._choose(graph)
        for node in list(graph):
            if node in chosen:
                self._narrow(graph, node)
            else:
                self._widen_inputs(node)
        self.widen_outputs(graph, {value for value in self._half if not is_present(value.name)})
        for old, new in self.stored.items():
            if not old.uses():
                del graph.initializers[str(old.name)]
                _rename(graph, new, str(old.name))
        self.fired = len(self.stored)

    def _choose(self, graph: ir.Graph) -> set[ir.Node]:
        """Return the nodes to compute in 16 bits: those that depend on the embedding, with exceptions."""
        chosen: set[ir.Node] = set()
        ending = _after_head(graph)
        for node, sources in reached(graph):
            if self.too_large(node):
                continue
            computes = node.op_type in _COMPUTING or _embeds(node)
            floats = [value for value in sources if value.dtype is None or value.dtype.is_floating_point()]
            # A node that moves integers only has no float to convert.
            follows = (
                node.op_type in _FOLLOWING
                and bool(floats)
                and all(value.producer() in chosen for value in floats)
            )
            if (computes or follows) and not node.domain and node not in ending:
                chosen.add(node)
        return chosen

    def _narrow(self, graph: ir.Graph, node: ir.Node) -> None:
        for position, value in enumerate(node.inputs):
            if value is None or value in self._half or value.dtype not in (_FLOAT, None):
                continue
            is_mask = node.op_type == "Attention" and position == _MASK
            node.replace_input_with(position, self._narrowed(graph, node, value, is_mask))
        if node.op_type == "Attention":
            node.attributes.add(ir.AttrInt64("softmax_precision", _FLOAT.value))
        for output in node.outputs:
            self._half.add(output)
            if output.dtype in (_FLOAT, None) and output.name:
                output.type = ir.TensorType(self.dtype)

    def _narrowed(self, graph: ir.Graph, node: ir.Node, value: ir.Value, is_mask: bool) -> ir.Value:
        """Return ``value`` in 16 bits, as an input of ``node``."""
        if value.is_graph_input() and is_past(value.name):
            value.type = ir.TensorType(self.dtype)
            self._half.add(value)
            return value
        tensor = weight(value)
        if tensor is not None:
            return self._store(graph, value, tensor)
        source = value.producer()
        if (
            source is not None
            and source.op_type == "DequantizeLinear"
            and weight(source.inputs[0]) is not None
        ):
            return self._dequantized(graph, source)
        if is_mask:
            return self._mask(graph, node, value)
        return self.cast(value, self.dtype, before=node)

    def _store(self, graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        return self.store(graph, value, lambda: _halved(tensor, self.dtype, str(value.name)))

    def _dequantized(self, graph: ir.Graph, source: ir.Node) -> ir.Value:
        """Make a DequantizeLinear return 16 bits, by storing its scales in 16 bits."""
        result, scale = source.outputs[0], source.inputs[1]
        if result not in self._half and scale is not None and (tensor := weight(scale)) is not None:
            source.replace_input_with(1, self._store(graph, scale, tensor))
            result.type = ir.TensorType(self.dtype)
            self._half.add(result)
        return result

    def _mask(self, graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
        """Cast an additive mask, whose lowest float must not become -inf: a row of them would be NaN."""
        if (value, self.dtype) not in self.casts:
            lowest = np.array(-LARGEST[self.dtype], np.float32)
            bound = shared_constant(graph, f"constants/lowest_{self.dtype.name.lower()}", lowest)
            raised = insert(node, "Max", [value, bound])
            raised.outputs[0].type = ir.TensorType(_FLOAT)
            self.casts[value, self.dtype] = self.cast(raised.outputs[0], self.dtype, before=node)
        return self.casts[value, self.dtype]

    def _widen_inputs(self, node: ir.Node) -> None:
        for position, value in enumerate(node.inputs):
            if value in self._half and value.dtype == self.dtype and node.op_type != "Shape":
                node.replace_input_with(position, self.cast(value, _FLOAT, before=node))


def is_half(graph: ir.Graph) -> bool:
    """Return whether a matrix product or attention of the graph has 16-bit operands."""
    nodes = [node for op_type in _COMPUTING for node in nodes_of(graph, op_type)]
    operands = [value for node in nodes for value in node.inputs]
    return any(value is not None and value.dtype in LARGEST for value in operands)


def reached(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Value]]]:
    """Yield the nodes that depend on the embedding, each with the inputs that do."""
    hidden: set[ir.Value] = set()
    for node in graph:
        sources = [value for value in node.inputs if value in hidden]
        if sources or _embeds(node):
            hidden.update(node.outputs)
            yield node, sources


def _embeds(node: ir.Node) -> bool:
    """Return whether a node looks up rows of a constant table by a graph input."""
    if node.op_type != "Gather" or node.domain:
        return False
    table, indices = node.inputs
    source = table.producer() if table is not None else None
    stored = table if source is None else source.inputs[0]
    return weight(stored) is not None and indices is not None and indices.is_graph_input()


def _after_head(graph: ir.Graph) -> set[ir.Node]:
    """Return the arithmetic nodes between the last product and the logits, such as a softcap."""
    nodes: set[ir.Node] = set()
    for output in graph.outputs:
        node = output.producer()
        while node is not None and node.op_type in _AFTER_HEAD and node.inputs[0] is not None:
            nodes.add(node)
            node = node.inputs[0].producer()
    return nodes


def _halved(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> ir.LazyTensor:
    """Return a weight in 16 bits as a lazy tensor.

    Raises:
        GraphError: at evaluation, if a value exceeds the type's range.
    """

    def compute() -> Array:
        content = tensor.numpy()
        with np.errstate(over="ignore"):
            result = content.astype(dtype.numpy())
        if not np.isfinite(result).all():
            raise GraphError(_misfit(content, name, dtype))
        return result

    return lazy(compute, dtype, shape_of(tensor))


def _misfit(content: Array, name: str, dtype: ir.DataType) -> str:
    if not np.isfinite(content).all():
        return f"weight {name} holds NaN or infinity"
    largest = float(np.abs(content.astype(np.float32)).max())
    advice = "; use bf16 instead" if dtype == ir.DataType.FLOAT16 else ""
    return (
        f"weight {name} reaches {largest:.4g}, above the limit {LARGEST[dtype]:.6g} of {dtype.name}{advice}"
    )


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    del graph.initializers[str(value.name)]
    value.name = name
    if value.const_value is not None:
        value.const_value.name = name
    graph.register_initializer(value)
