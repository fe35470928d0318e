"""Compute the shape of every value, and the content of small ones, for several sets of input sizes.

Traces compute shapes in many ways, so patterns are not matched. The graph is evaluated with concrete sizes
of its dynamic axes: small values are computed, of larger ones only the shape. What holds for all sets of
sizes (``probe_sizes.py``) is taken as a fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.defs import SchemaError

from ...contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS
from ..graph.lazy import bits_of
from .constant_evaluation import MAX_CONTENT, content_of
from .known_shapes import shape_of_result, type_of_result
from .probe_sizes import Reach, axis_name, decoder_sizes, sizes_of_names

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]

_AXES = {
    INPUT_IDS: ("batch", "sequence"),
    POSITION_IDS: ("batch", "sequence"),
    ATTENTION_MASK: ("batch", "total"),
}
_CACHE_AXES = ("batch", "heads", "past", "head_dim")


class ShapeFacts:
    """Shapes, types and small contents of the values of a graph.

    Args:
        graph: a decoder whose inputs follow the portable contract. In any other graph, axes with the same
            name have the same size.
        far: whether to try sizes beyond all constants in the graph first. If the graph does not run with
            those, for example because a table has fewer rows than tokens, smaller sizes are used.
        decoder: whether inputs with the contract's names have the contract's axes.

    Attributes:
        probes: the sets of sizes of a decoder.
    """

    def __init__(self, graph: ir.Graph, *, far: bool = True, decoder: bool = True) -> None:
        follows = decoder and any(value.name == INPUT_IDS for value in graph.inputs)
        self._axes = _AXES if follows else {}
        self._inferred: dict[tuple[object, ...], dict[str, onnx.TypeProto]] = {}
        self._imports = [
            onnx.OperatorSetIdProto(domain=name, version=number)
            for name, number in graph.opset_imports.items()
        ]
        self._version = graph.opset_imports.get("", 1)
        last = Reach.CLOSE if self._axes else Reach.LARGE
        for reach in list(Reach)[0 if far else 1 : list(Reach).index(last) + 1]:
            self._evaluate(graph, reach)
            if self._fits:
                if reach is Reach.LARGE:
                    self._try_small(graph)
                return
        self._evaluate(graph, Reach.USUAL)

    def _try_small(self, graph: ir.Graph) -> None:
        """Add sets in which one axis is 1, if the graph runs with them.

        A graph that needs another axis to be large does not run with all axes of 1, and what is true of large
        sizes only, such as min(size, 2) = 2, would be taken for a fact.
        """
        large = self._sizes
        small = []
        for name in large[0]:
            self._evaluate_with(graph, [{**large[0], name: 1}, *large])
            small += self._sizes[:1] if self._fits else []
        self._evaluate_with(graph, [*small, *large])

    def _evaluate(self, graph: ir.Graph, reach: Reach) -> None:
        self.probes = decoder_sizes(graph, reach) if self._axes else ()
        sizes = [probe.named() for probe in self.probes] or sizes_of_names(graph, reach)
        self._evaluate_with(graph, sizes)

    def _evaluate_with(self, graph: ir.Graph, sizes: list[dict[str, int]]) -> None:
        self._sizes = sizes
        self._fits = True  # whether the graph runs with all sizes
        self._shapes: dict[ir.Value, Shapes] = {}
        self._types: dict[ir.Value, int] = {}
        self._contents: dict[ir.Value, tuple[Array, ...]] = {}
        for value in graph.inputs:
            self._learn_input(value)
        for value in graph.initializers.values():
            if not value.is_graph_input():
                self._learn_initializer(value)
        for node in graph:
            self._learn_node(node)

    def shapes(self, value: ir.Value | None) -> Shapes | None:
        """Return the shape of a value for each set of sizes, None if unknown."""
        return None if value is None else self._shapes.get(value)

    def content(self, value: ir.Value | None) -> Array | None:
        """Return the content of a small value if it is the same for all sizes, else None."""
        contents = self.contents(value)
        if not contents or any(not _same(contents[0], other) for other in contents[1:]):
            return None
        return contents[0]

    def contents(self, value: ir.Value | None) -> tuple[Array, ...] | None:
        """Return the content of a small value for each set of sizes, None if unknown."""
        return None if value is None else self._contents.get(value)

    def dtype(self, value: ir.Value | None) -> int | None:
        """Return the element type as ONNX's number, None if unknown."""
        return None if value is None else self._types.get(value)

    def symbolic(self, value: ir.Value) -> ir.Shape | None:
        """Return the shape: fixed sizes as numbers, sizes of a known axis by its name, others unnamed."""
        shapes = self.shapes(value)
        if shapes is None:
            return None
        return ir.Shape([self._symbol(sizes) for sizes in zip(*shapes, strict=True)])

    def _symbol(self, sizes: Sequence[int]) -> int | str | None:
        if len(set(sizes)) == 1:
            return sizes[0]
        for name in self._sizes[0]:
            if all(known[name] == size for known, size in zip(self._sizes, sizes, strict=True)):
                return name
        return None

    def _learn_input(self, value: ir.Value) -> None:
        if not isinstance(value.type, ir.TensorType) or value.shape is None or value.dtype is None:
            return
        names = self._names(value)
        shapes = []
        for known in self._sizes:
            shape = [
                dim if isinstance(dim, int) else known.get(name)
                for dim, name in zip(value.shape, names, strict=True)
            ]
            if any(size is None for size in shape):
                return
            shapes.append(tuple(size for size in shape if size is not None))
        self._shapes[value], self._types[value] = tuple(shapes), int(value.dtype)

    def _names(self, value: ir.Value) -> list[str]:
        """Return the axis names of an input: the contract's in a decoder, else the graph's."""
        if value.shape is None:
            return []
        rank = len(value.shape)
        if self._axes:
            axes = self._axes.get(str(value.name), _CACHE_AXES if rank == len(_CACHE_AXES) else ())
            return [*axes, *[""] * rank][:rank]
        return [axis_name(value, axis) for axis in range(rank)]

    def _learn_initializer(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is None:
            return
        shape = tuple(tensor.shape.numpy())
        self._shapes[value], self._types[value] = (shape,) * len(self._sizes), int(tensor.dtype)
        if tensor.size <= MAX_CONTENT and bits_of(tensor.dtype) >= 8:
            self._contents[value] = (tensor.numpy(),) * len(self._sizes)

    def _learn_node(self, node: ir.Node) -> None:
        if node.domain or any(value is not None and value not in self._shapes for value in node.inputs):
            self._learn_target(node)
            return
        contents = list(self._compute(node))
        if contents and all(content is not None for content in contents):
            found = tuple(content for content in contents if content is not None)
            shapes = tuple(content.shape for content in found)
            if self._note(node.outputs[0], shapes, int(ir.DataType.from_numpy(found[0].dtype))):
                self._contents[node.outputs[0]] = found
            return
        if not self._apply_rule(node):
            self._infer(node)

    def _note(self, output: ir.Value, shapes: Shapes, element: int) -> bool:
        """Record shape and type of an output, unless its rank depends on the sizes, as with some Squeezes."""
        of_one_rank = len({len(shape) for shape in shapes}) == 1
        if of_one_rank:
            self._shapes[output], self._types[output] = shapes, element
        return of_one_rank

    def _learn_target(self, node: ir.Node) -> None:
        """Use a Reshape's target as the shape of its result if the shape of its input depends on data."""
        target = self._contents.get(node.inputs[1]) if node.op_type == "Reshape" and node.inputs[1] else None
        output = node.outputs[0]
        if target is not None and output.dtype is not None and all((sizes > 0).all() for sizes in target):
            self._note(output, tuple(tuple(map(int, sizes)) for sizes in target), int(output.dtype))

    def _apply_rule(self, node: ir.Node) -> bool:
        """Infer shapes and type by ``known_shapes``; return whether that was possible."""
        operands = [value for value in node.inputs if value is not None]
        shapes, misfits = [], 0
        for column in zip(*(self._shapes[value] for value in operands), strict=True):
            try:
                shapes.append(shape_of_result(node, column))
            except (IndexError, ValueError):  # these sizes do not match, for example those of two inputs
                misfits += 1
        if misfits:
            self._fits &= misfits == len(self._sizes)
            return False
        known = tuple(shape for shape in shapes if shape is not None)
        if not operands or len(known) < len(self._sizes):
            return False
        self._note(node.outputs[0], known, type_of_result(node, [self._types[value] for value in operands]))
        return True

    def _compute(self, node: ir.Node) -> Iterator[Array | None]:
        for index in range(len(self._sizes)):
            operands = [None if value is None else self._operand(value, index) for value in node.inputs]
            shapes = [() if value is None else self._shapes[value][index] for value in node.inputs]
            yield content_of(node, operands, shapes)

    def _operand(self, value: ir.Value, index: int) -> Array | None:
        contents = self._contents.get(value)
        return None if contents is None else contents[index]

    def _infer(self, node: ir.Node) -> None:
        """Infer shapes by ONNX's shape inference, once per set of sizes."""
        try:
            schema = onnx.defs.get_schema(node.op_type, self._version, node.domain)
        except SchemaError:
            return
        proto = _nameless(node)
        if node.op_type == "STFT" and "onesided" not in node.attributes:
            proto.attribute.append(onnx.AttributeProto(name="onesided", type=onnx.AttributeProto.INT, i=1))
        form = proto.SerializeToString(deterministic=True)
        results = [self._infer_once(node, schema, proto, form, index) for index in range(len(self._sizes))]
        self._fits &= all(results) or not any(results)
        for place, output in enumerate(node.outputs):
            types = [result.get(f"y{place}") for result in results]
            shapes = [_shape_of(type_) for type_ in types if type_ is not None]
            known = tuple(shape for shape in shapes if shape is not None)
            if types[0] is not None and len(known) == len(self._sizes):
                self._note(output, known, types[0].tensor_type.elem_type)

    def _infer_once(
        self, node: ir.Node, schema: onnx.defs.OpSchema, proto: onnx.NodeProto, form: bytes, index: int
    ) -> dict[str, onnx.TypeProto]:
        """Return the types of the outputs, once for all nodes that are alike: those of each layer are."""
        operands = {
            f"x{place}": (self._types[value], self._shapes[value][index], self._operand(value, index))
            for place, value in enumerate(node.inputs)
            if value is not None
        }
        key = (
            form,
            *(
                (name, element, shape, None if content is None else content.tobytes())
                for name, (element, shape, content) in operands.items()
            ),
        )
        if key not in self._inferred:
            self._inferred[key] = self._infer_types(schema, proto, operands)
        return self._inferred[key]

    def _infer_types(
        self,
        schema: onnx.defs.OpSchema,
        proto: onnx.NodeProto,
        operands: Mapping[str, tuple[int, Sequence[int], Array | None]],
    ) -> dict[str, onnx.TypeProto]:
        types = {name: _type_of(element, shape) for name, (element, shape, _) in operands.items()}
        data = {
            name: onnx.numpy_helper.from_array(content, name)
            for name, (_, _, content) in operands.items()
            if content is not None
        }
        try:
            return onnx.shape_inference.infer_node_outputs(
                schema, proto, types, data, opset_imports=self._imports
            )
        except (
            SchemaError,
            onnx.checker.ValidationError,
            onnx.shape_inference.InferenceError,
            RuntimeError,
            ValueError,
        ):
            return {}  # ONNX has no shape inference for this operator


def _nameless(node: ir.Node) -> onnx.NodeProto:
    """Return a node whose inputs are named x0, x1, ... and whose outputs y0, y1, ..."""
    proto = ir.serde.serialize_node(node)
    for field in ("name", "doc_string", "metadata_props"):
        proto.ClearField(field)
    for letter, names in {"x": proto.input, "y": proto.output}.items():
        for place, name in enumerate(names):
            names[place] = f"{letter}{place}" if name else ""
    return proto


def _type_of(element: int, shape: Sequence[int]) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    proto.tensor_type.elem_type = element
    proto.tensor_type.shape.SetInParent()
    for size in shape:
        proto.tensor_type.shape.dim.add().dim_value = size
    return proto


def _shape_of(type_: onnx.TypeProto) -> tuple[int, ...] | None:
    if not type_.HasField("tensor_type") or not type_.tensor_type.HasField("shape"):
        return None
    dims = type_.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _same(left: Array, right: Array) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()
