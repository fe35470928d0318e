"""Fusions of onnxruntime that change results, and the graphs in which they would.

onnxruntime matches the outline of a pattern and ignores some of its details (1.32): for norms the order of a
subtraction, the exponent, axes that a mean drops (issues 25855, 30513, 31147 and 31980 of
https://github.com/microsoft/onnxruntime), for two quantized pairs in a row that their parameters differ. A
session disables such an optimizer if a pattern of its outline is not exactly the one that it computes.
Others make valid graphs invalid:
- int8 tensors of opset 21 become uint8 by their zero points, not by the attribute output_dtype, which the
  graph or onnxruntime itself wrote (25526);
- quantizers to int32, which do not exist, are inserted behind DequantizeLinear (25001);
- with exact 8-bit sums, a zero point of two int8 weights that are quantized in the graph is replaced twice;
- the reader of a quotient of constants is joined with it when the quotient is folded already (32413, 32416);
- Clip behind Relu is joined with it only if its bounds are floats of 16 or 32 bits (10936, 23116, 24158).
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...records import dataclass

if TYPE_CHECKING:
    import onnx

ENTRY = "optimization.disable_specified_optimizers"
_NORMS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
_PAIRS = ("DoubleQDQPairsRemover",)
_SIGNED = ("QDQS8ToU8Transformer",)
_WIDE = ("QDQPropagationTransformer",)
_QUOTIENTS = ("DivMulFusion",)
_BOUNDS = ("FuseReluClip",)
_OUTLINES = (
    ((b"ReduceMean", b"Sqrt"), _NORMS),
    ((b"QuantizeLinear", b"DequantizeLinear"), _PAIRS),
    ((b"DequantizeLinear",), _SIGNED),
    ((b"DequantizeLinear",), _WIDE),
    ((b"Div", b"Mul"), _QUOTIENTS),
    ((b"Relu", b"Clip"), _BOUNDS),
)
_WITH_ZERO_POINT = 3  # inputs of QuantizeLinear and DequantizeLinear
_FIRST_OUTPUT_DTYPE = 21  # the opset from which QuantizeLinear has output_dtype
# onnxruntime inserts quantized pairs behind those that follow DequantizeLinear.
_MOVES = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Flatten", "Gather"})
_JOINED_BOUNDS = (np.float16, np.float32)
_SMALL = 4096  # bytes; larger initializers are no axes, exponents or scales of a tensor
# onnxruntime may remove these between two quantized pairs.
_MAY_VANISH = frozenset(
    {"Add", "Cast", "Concat", "Div", "Dropout", "Expand", "Flatten", "Identity", "Mul", "Pad", "Reshape"}
    | {"Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze"}
)
_GRAPH_OF_MODEL, _INITIALIZER_OF_GRAPH = 7, 5  # numbers of protobuf fields in onnx.proto
_BYTES = 2  # the wire type of a field that states its length


def wrong_fusions(model: str | os.PathLike[str] | bytes, *, exact_sums: bool = False) -> tuple[str, ...]:
    """Return the names of onnxruntime's optimizers that would change the results of a file or its content.

    Only nodes and small initializers are read. What is no ONNX needs none.

    Args:
        model: the file, or its content.
        exact_sums: whether the session is asked for exact 8-bit sums.
    """
    if isinstance(model, bytes):
        return _of_content(model, exact_sums)
    if not os.stat(model).st_size:
        return ()  # it cannot be mapped
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _of_content(content, exact_sums)


def _of_content(content: mmap.mmap | bytes, exact_sums: bool) -> tuple[str, ...]:
    candidates = [fusion for words, fusion in _OUTLINES if all(content.find(word) >= 0 for word in words)]
    if not candidates:
        return ()
    import onnx  # only here: most models have no candidate, and loading takes a tenth of a second
    from google.protobuf.message import DecodeError

    with memoryview(content) as view:
        try:
            model = onnx.ModelProto.FromString(_without_weights(view))
        except (DecodeError, IndexError, ValueError):
            return ()
    scopes = list(_scopes(model))
    typed = any(not each.domain and each.version >= _FIRST_OUTPUT_DTYPE for each in model.opset_import)
    tests = {
        _NORMS: _has_other_norm,
        _PAIRS: _has_unequal_pairs,
        _SIGNED: lambda scope: (
            (typed and _has_typed_pairs(scope)) or (exact_sums and _quantizes_weights(scope))
        ),
        _WIDE: lambda scope: any(_is_moved(scope, node, np.int32) for node in scope.nodes),
        _QUOTIENTS: _has_constant_quotient,
        _BOUNDS: _has_other_bounds,
    }
    return tuple(name for fusion in candidates if any(map(tests[fusion], scopes)) for name in fusion)


def _without_weights(view: memoryview) -> bytes:
    """Return a serialized model without its large initializers."""
    parts: list[bytes] = []
    for number, start, begin, end in _fields(view):
        if number != _GRAPH_OF_MODEL:
            parts.append(bytes(view[start:end]))
            continue
        graph = view[begin:end]
        kept = b"".join(
            bytes(graph[first:last])
            for inner, first, _, last in _fields(graph)
            if inner != _INITIALIZER_OF_GRAPH or last - first <= _SMALL
        )
        parts += [bytes(view[start : start + 1]), _varint(len(kept)), kept]
    return b"".join(parts)


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of each field of a protobuf message, and where it, its content and its end are.

    Raises:
        ValueError: it is no protobuf message.
    """
    place = 0
    while place < len(view):
        start = place
        tag, place = _read_varint(view, place)
        begin, kind = place, tag & 7
        if kind == 0:
            _, place = _read_varint(view, place)
        elif kind == _BYTES:
            size, begin = _read_varint(view, place)
            place = begin + size
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        if place > len(view):
            raise ValueError("a field ends behind the message")
        yield tag >> 3, start, begin, place


def _read_varint(view: memoryview, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = view[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


@dataclass(slots=True)
class _Scope:
    """The nodes of one graph or function, with their constants."""

    nodes: list[onnx.NodeProto]
    constants: dict[str, onnx.TensorProto]
    inputs: frozenset[str] = frozenset()
    widths: Mapping[str, int] = field(default_factory=dict)  # last sizes of values whose shapes are stated
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for node in self.nodes:
            self.producers |= {name: node for name in node.output if name}
            for name in node.input:
                self.readers[name].append(node)

    def source(self, name: str, op_type: str) -> onnx.NodeProto | None:
        """Return the producer of a value before casts, if it is an ``op_type``."""
        node = self.producers.get(name)
        while node is not None and node.op_type == "Cast" and not node.domain:
            node = self.producers.get(node.input[0])
        return node if node is not None and node.op_type == op_type and not node.domain else None

    def read_by(self, name: str, op_type: str) -> Iterator[tuple[onnx.NodeProto, str]]:
        """Yield the ``op_type`` nodes that read a value, also behind casts, and the name they read."""
        for node in self.readers[name]:
            if node.op_type == "Cast" and not node.domain:
                yield from self.read_by(node.output[0], op_type)
            elif node.op_type == op_type and not node.domain:
                yield node, name

    def constant(self, name: str) -> npt.NDArray[Any] | None:
        """Return a small constant, None if the value is another."""
        from onnx import numpy_helper

        tensor, node = self.constants.get(name), self.producers.get(name)
        if tensor is not None and not tensor.external_data:
            return numpy_helper.to_array(tensor)
        if node is None or node.op_type != "Constant":
            return None
        for attribute in node.attribute:
            match attribute.name:
                case "value":
                    return numpy_helper.to_array(attribute.t)
                case "value_float" | "value_int":
                    return np.asarray(attribute.f if attribute.name == "value_float" else attribute.i)
                case "value_floats" | "value_ints":
                    return np.asarray([*attribute.floats, *attribute.ints])
        return None

    def uncast(self, name: str) -> str:
        """Return the value before casts."""
        node = self.producers.get(name)
        while node is not None and node.op_type == "Cast" and not node.domain:
            name = node.input[0]
            node = self.producers.get(name)
        return name


def _scopes(model: onnx.ModelProto) -> Iterator[_Scope]:
    def of_graph(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> Iterator[_Scope]:
        constants = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
        shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
        widths = {name: dims[-1].dim_value for name, dims in shapes.items() if dims and dims[-1].dim_value}
        inputs = frozenset(value.name for value in graph.input if value.name not in constants)
        yield from of_nodes(_Scope(list(graph.node), constants, inputs, widths))

    def of_nodes(scope: _Scope) -> Iterator[_Scope]:
        yield scope
        constants = scope.constants
        for attribute in (attribute for node in scope.nodes for attribute in node.attribute):
            for graph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from of_graph(graph, constants)

    yield from of_graph(model.graph, {})
    for function in model.functions:
        yield from of_nodes(_Scope(list(function.node), {}, frozenset(function.input)))


def _has_other_norm(scope: _Scope) -> bool:
    """Return whether mean -> add -> sqrt -> divide occurs in a form that is no layer norm and no RMS norm."""
    for node in scope.nodes:
        if node.op_type != "ReduceMean" or node.domain:
            continue
        for add, _ in scope.read_by(node.output[0], "Add"):
            for root, _ in scope.read_by(add.output[0], "Sqrt"):
                if not all(_is_exact(scope, node, *end) for end in scope.read_by(root.output[0], "Div")):
                    return True
    return False


def _is_exact(scope: _Scope, variance: onnx.NodeProto, divide: onnx.NodeProto, root: str) -> bool:
    """Return whether x / sqrt(mean(x^2) + e) is computed over axes that are kept, with x centred or not."""
    axes = _kept_axes(scope, variance)
    square = scope.source(variance.input[0], "Pow") or scope.source(variance.input[0], "Mul")
    if axes is None or square is None or divide.input[1] != root:
        return False
    base = scope.uncast(square.input[0])
    if square.op_type == "Pow":
        exponent = scope.constant(square.input[1])
        if exponent is None or exponent.size != 1 or float(exponent.reshape(())) != 2:
            return False
    elif scope.uncast(square.input[1]) != base:
        return False
    scaled = [scope.uncast(divide.input[0])]
    if scope.constant(scaled[0]) is not None:  # 1 / sqrt(...), which is multiplied later
        products = scope.read_by(divide.output[0], "Mul")
        scaled = [scope.uncast(name) for node, read in products for name in node.input if name != read]
    if _is_scaled_wider(scope, base, divide):
        return False
    return _is_centred_exactly(scope, base, axes) and all(
        name == base or _equal_nodes(scope, name, base) for name in scaled
    )


def _is_scaled_wider(scope: _Scope, base: str, divide: onnx.NodeProto) -> bool:
    """Return whether a norm over one element is multiplied by a vector, which makes it wider."""
    difference = scope.source(base, "Sub")
    width = next(
        (
            scope.widths[name]
            for name in (base, *(difference.input if difference else ()))
            if name in scope.widths
        ),
        None,
    )
    factors = (
        scope.constant(name)
        for node, read in scope.read_by(divide.output[0], "Mul")
        for name in node.input
        if name != read
    )
    return width == 1 and any(factor is not None and factor.size > 1 for factor in factors)


def _is_centred_exactly(scope: _Scope, value: str, axes: list[int]) -> bool:
    """Return whether a value is x - mean(x) over ``axes``, or no difference to a mean."""
    difference = scope.source(value, "Sub")
    if difference is None:
        return True
    means = [scope.source(name, "ReduceMean") for name in difference.input]
    if means == [None, None]:
        return True
    mean = means[1]
    if mean is None:
        return False
    return _kept_axes(scope, mean) == axes and scope.uncast(mean.input[0]) == scope.uncast(
        difference.input[0]
    )


def _equal_nodes(scope: _Scope, a: str, b: str) -> bool:
    first, second = scope.producers.get(a), scope.producers.get(b)
    if first is None or second is None:
        return False
    return (first.op_type, list(first.input), list(first.attribute)) == (
        second.op_type,
        list(second.input),
        list(second.attribute),
    )


def _kept_axes(scope: _Scope, mean: onnx.NodeProto) -> list[int] | None:
    """Return the axes of a ReduceMean that keeps its axes, None for another or unknown ones."""
    attributes = {attribute.name: attribute for attribute in mean.attribute}
    if "keepdims" in attributes and not attributes["keepdims"].i:
        return None
    if "axes" in attributes:
        return list(attributes["axes"].ints)
    axes = scope.constant(mean.input[1]) if len(mean.input) > 1 and mean.input[1] else None
    return None if axes is None else [int(axis) for axis in axes.reshape(-1)]


def _has_unequal_pairs(scope: _Scope) -> bool:
    """Return whether Q DQ Q DQ occurs with unequal parameters, maybe behind nodes that vanish."""
    for node in scope.nodes:
        if node.op_type == "DequantizeLinear" and scope.source(node.input[0], "QuantizeLinear") is not None:
            waiting, seen = [node.output[0]], {node.output[0]}
            while waiting:
                for reader in scope.readers[waiting.pop()]:
                    if reader.op_type == "QuantizeLinear" and not _equal_parameters(scope, node, reader):
                        return True
                    if reader.op_type in _MAY_VANISH:
                        waiting += [name for name in reader.output if name not in seen]
                        seen.update(reader.output)
    return False


def _has_typed_pairs(scope: _Scope) -> bool:
    """Return whether a quantizer of int8 states its type beside its zero point, or may be inserted so."""
    stating = (
        node
        for node in scope.nodes
        if node.op_type == "QuantizeLinear" and any(each.name == "output_dtype" for each in node.attribute)
    )
    return any(_has_zero_point(scope, node, np.int8) for node in stating) or any(
        _is_moved(scope, node, np.int8) for node in scope.nodes
    )


def _quantizes_weights(scope: _Scope) -> bool:
    """Return whether two quantizers to int8 depend on no input, so that onnxruntime folds them."""
    varying, count = set(scope.inputs), 0
    for node in scope.nodes:
        if varying.intersection(node.input):
            varying.update(node.output)
        elif node.op_type == "QuantizeLinear" and not node.domain:
            count += _has_zero_point(scope, node, np.int8)
    return count > 1


def _has_zero_point(scope: _Scope, node: onnx.NodeProto, dtype: npt.DTypeLike) -> bool:
    zero = scope.constant(node.input[2]) if len(node.input) == _WITH_ZERO_POINT else None
    return zero is not None and zero.dtype == dtype


def _is_moved(scope: _Scope, node: onnx.NodeProto, dtype: npt.DTypeLike) -> bool:
    """Return whether DequantizeLinear of ``dtype`` is in front of nodes that move elements only."""
    return (
        node.op_type == "DequantizeLinear"
        and not node.domain
        and any(reader.op_type in _MOVES for reader in scope.readers[node.output[0]])
        and _has_zero_point(scope, node, dtype)
    )


def _has_constant_quotient(scope: _Scope) -> bool:
    """Return whether a quotient of two constants is multiplied."""
    return any(
        node.op_type == "Div"
        and not node.domain
        and all(scope.constant(name) is not None for name in node.input)
        and any(reader.op_type == "Mul" for reader in scope.readers[node.output[0]])
        for node in scope.nodes
    )


def _has_other_bounds(scope: _Scope) -> bool:
    """Return whether Clip behind Relu has constant bounds that are no floats of 16 or 32 bits."""
    for node in scope.nodes:
        if node.op_type == "Relu" and not node.domain:
            for clip, _ in scope.read_by(node.output[0], "Clip"):
                bounds = [scope.constant(name) for name in clip.input[1:]]
                if any(bound is not None and bound.dtype not in _JOINED_BOUNDS for bound in bounds):
                    return True
    return False


def _equal_parameters(scope: _Scope, first: onnx.NodeProto, second: onnx.NodeProto) -> bool:
    pairs = zip([*first.input[1:], ""][:2], [*second.input[1:], ""][:2], strict=True)
    return all(a == b or _equal_constants(scope, a, b) for a, b in pairs)


def _equal_constants(scope: _Scope, a: str, b: str) -> bool:
    first, second = scope.constant(a), scope.constant(b)
    return (
        first is not None
        and second is not None
        and first.dtype == second.dtype
        and bool(np.array_equal(first, second))
    )
