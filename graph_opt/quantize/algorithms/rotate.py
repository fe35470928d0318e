"""QuaRot: rotate the residual stream, so that no channel is much larger than the others.

    h                           ->  h R
    MatMul(Norm(h) * gain, W)   ->  MatMul(Norm(h R), R^T diag(gain) W)
    h + MatMul(x, W)            ->  h R + MatMul(x, W R)

R is orthogonal, so the root mean square of h does not change, and the outputs are equal in exact arithmetic.
Rounding to 8 bits with one scale per row or block loses less. S. Ashkboos et al., "QuaRot",
https://arxiv.org/abs/2404.00456, without its online rotations inside of layers. A head that is tied to the
embedding keeps the embedding's weight, and the product R^T diag(gain) R precedes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS
from ....errors import GraphError
from ....records import dataclass
from ...graph.edit import add_initializer, insert, int_attribute, nodes_of, shared_constant, weight
from ...graph.lazy import Array, lazy, shape_of
from ...passes.base import GraphPass
from .layer_changes import ROTATE, LayerChanges, recorded
from .rotation import Rotation

HEAD_TURN = "rotate.head.weight"  # the matrix in front of a head that is tied to the embedding
_NORM = "RMSNormalization"


class RotatePass(GraphPass):
    """Rotate the residual stream of a decoder; a graph whose stream cannot be rotated is not changed."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rotate the stream that starts at the embedding."""
        with recorded(graph) as changes:
            for node in nodes_of(graph, "Gather"):
                ids = node.inputs[1]
                if ids is None or ids.name != INPUT_IDS or not ids.is_graph_input():
                    continue
                try:
                    stream = _follow(node)
                except _CannotRotateError as obstacle:
                    self.refuse(node, f"the residual stream is not rotated: {obstacle}")
                    continue
                _record(changes, stream)
                _rotate(graph, stream)
                self.fired += 1


class _CannotRotateError(Exception):
    """Why a residual stream cannot be rotated."""


@dataclass(slots=True)
class _Stream:
    """A residual stream: its embedding, the weights that are added to it, and the norms that read it."""

    table: ir.Value
    size: int
    writers: list[ir.Value] = field(default_factory=list)  # weights [in, size] and biases [size]
    norms: list[ir.Node] = field(default_factory=list)


def _follow(gather: ir.Node) -> _Stream:
    """Return the residual stream that starts at the embedding.

    Raises:
        _CannotRotateError: a node of the stream does not commute with a rotation.
    """
    table = gather.inputs[0]
    if table is None or not _is_matrix(table) or int_attribute(gather, "axis", 0):
        raise _CannotRotateError("the embedding is no float matrix")
    stream = _Stream(table, _shape(table)[1])
    seen, waiting = {gather.outputs[0]}, [gather.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value is not gather.outputs[0]:
            stream.writers += _written_by(value, stream.size)
        for other in _continued(value, stream):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    for norm in stream.norms:
        for reader in _readers(norm):
            if reader.weight is not table and len(reader.weight.uses()) > 1:
                raise _CannotRotateError(f"{reader.weight.name} is read more than once")
    if not stream.norms:
        raise _CannotRotateError("no RMSNormalization reads it")
    return stream


def _continued(value: ir.Value, stream: _Stream) -> Iterator[ir.Value]:
    """Yield the other values of the stream around the consumers of ``value``, and note its norms."""
    if value.is_graph_output():
        raise _CannotRotateError(f"{value.name} is an output of the graph")
    for node, position in value.uses():
        if node.domain or node.op_type not in (_NORM, "Add", "Mul"):
            raise _CannotRotateError(f"{node.op_type} reads {value.name}")
        if node.op_type == _NORM:
            if position or int_attribute(node, "axis", -1) != -1 or not _is_own(node.inputs[1]):
                raise _CannotRotateError(f"{node.name} normalizes along other axes")
            stream.norms.append(node)
            continue
        other = node.inputs[1 - position]
        if node.op_type == "Mul" and not _is_scalar(other):
            raise _CannotRotateError(f"{node.name} multiplies its channels")
        yield node.outputs[0]
        if other is not None and node.op_type == "Add":
            yield other


def _written_by(value: ir.Value, size: int) -> list[ir.Value]:
    """Return the weight that computes a value of the stream, [] for a sum of other values of the stream."""
    node = value.producer()
    if node is None:
        if weight(value) is None or _shape(value) != (size,) or len(value.uses()) != 1:
            raise _CannotRotateError(f"{value.name} is added to it")
        return [value]
    if node.op_type == "MatMul" and not node.domain:
        factor = node.inputs[1]
        if factor is None or not _is_matrix(factor) or len(factor.uses()) > 1:
            raise _CannotRotateError(f"{value.name} is no product with a float weight of its own")
        return [factor]
    is_sum = node.op_type == "Add" or (node.op_type == "Mul" and any(map(_is_scalar, node.inputs)))
    if node.domain or not is_sum:
        raise _CannotRotateError(f"{node.op_type} writes {value.name}")
    return []


@dataclass(frozen=True, slots=True)
class _Reader:
    """A product that reads a normalized value: the node, the weight, and whether it is [out, in]."""

    node: ir.Node
    weight: ir.Value
    transposed: bool


def _readers(norm: ir.Node) -> Iterator[_Reader]:
    """Yield the products that read the output of a norm, also through reshapes that keep the channels.

    Raises:
        _CannotRotateError: something else reads it.
    """
    values, channels = [norm.outputs[0]], _shape(norm.inputs[1])
    while values:
        value = values.pop()
        if value.is_graph_output():
            raise _CannotRotateError(f"{value.name} is an output of the graph")
        for node, position in value.uses():
            factor = node.inputs[1] if len(node.inputs) > 1 else None
            if node.op_type == "Reshape" and not node.domain and _keeps_channels(node, channels):
                values.append(node.outputs[0])
            elif position or node.domain or factor is None or not _is_matrix(factor):
                raise _CannotRotateError(f"{node.op_type} reads {value.name}")
            elif node.op_type == "MatMul":
                yield _Reader(node, factor, transposed=False)
            elif node.op_type == "Gemm" and int_attribute(node, "transB", 0):
                yield _Reader(node, factor, transposed=True)
            else:
                raise _CannotRotateError(f"{node.op_type} reads {value.name}")


def _rotate(graph: ir.Graph, stream: _Stream) -> None:
    rotation = Rotation(stream.size)
    ones = shared_constant(graph, f"rotate.ones_{stream.size}", np.ones(stream.size, np.float32))
    for norm in stream.norms:
        gain = norm.inputs[1]
        for reader in list(_readers(norm)):
            if reader.weight is stream.table:
                _turn_input(graph, reader.node, rotation, _content(gain))
            else:
                _replace(reader.weight, _input_change(rotation, _content(gain), reader.transposed))
        norm.replace_input_with(1, ones)
        if gain is not None and not gain.uses():
            del graph.initializers[str(gain.name)]
    for writer in stream.writers:
        _replace(writer, lambda w: rotation.after(np.atleast_2d(w)))
    _replace(stream.table, rotation.after)


def _record(changes: LayerChanges, stream: _Stream) -> None:
    for norm in stream.norms:
        number = changes.vector(_content(norm.inputs[1]).numpy())
        for reader in _readers(norm):
            if reader.weight is not stream.table:
                changes.change_inputs(reader.weight, f"*{number}", ROTATE)
    for writer in stream.writers:
        changes.change_outputs(writer, ROTATE)


def _input_change(rotation: Rotation, gain: ir.TensorProtocol, transposed: bool) -> Callable[[Array], Array]:
    """Return the function that changes a weight for rotated inputs without a gain."""
    if transposed:
        return lambda matrix: rotation.after(matrix * gain.numpy())
    return lambda matrix: rotation.before(matrix * gain.numpy()[:, None])


def _turn_input(graph: ir.Graph, node: ir.Node, rotation: Rotation, gain: ir.TensorProtocol) -> None:
    """Insert the product with R^T diag(gain) R in front of a node."""

    def compute() -> Array:
        return rotation.before(rotation.rotated(np.diag(gain.numpy().astype(np.float64))))

    shape = (rotation.size, rotation.size)
    turn = add_initializer(graph, HEAD_TURN, lazy(compute, ir.DataType.FLOAT, shape))
    product = insert(node, "MatMul", [node.inputs[0], turn])
    product.name = "rotate.head/MatMul"
    product.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    node.replace_input_with(0, product.outputs[0])


def _replace(value: ir.Value, change: Callable[[Array], Array]) -> None:
    """Change a weight, lazily."""
    tensor = _content(value)
    changed = lazy(lambda: change(tensor.numpy()), ir.DataType.FLOAT, shape_of(tensor))
    changed.name = value.name
    value.const_value = changed


def _content(value: ir.Value | None) -> ir.TensorProtocol:
    tensor = weight(value)
    if tensor is None:
        raise GraphError(f"initializer {None if value is None else value.name} has no content")
    return tensor


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    return shape_of(_content(value))


def _is_matrix(value: ir.Value) -> bool:
    tensor = weight(value)
    return tensor is not None and len(tensor.shape) == 2 and tensor.dtype == ir.DataType.FLOAT


def _is_scalar(value: ir.Value | None) -> bool:
    tensor = weight(value)
    return tensor is not None and tensor.size == 1


def _is_own(value: ir.Value | None) -> bool:
    """Return whether a value is a float weight."""
    tensor = weight(value)
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT


def _keeps_channels(node: ir.Node, shape: tuple[int, ...]) -> bool:
    """Return whether a Reshape has a constant shape that ends in the number of channels."""
    target = weight(node.inputs[1])
    return target is not None and tuple(target.numpy()[-1:]) == shape
