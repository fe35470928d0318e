"""Convert any graph to fp16 or bf16 where ONNX's schemas allow it; inputs and outputs stay float32.

P. Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740. Values beyond the
type's range on samples stay float32, as do operators that accumulate, and operators that ONNX does not
define for the type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from ....errors import GraphError, UsageError
from ...graph.edit import subgraphs, weight
from ...graph.lazy import lazy
from ...graph.onnx_files import read_onnx
from ...passes.shape_inference import ShapeInferencePass
from ..formats.half_pass import HALF_TYPES, LARGEST, HalfPass
from .values import Feed, GraphValues

_FLOAT = ir.DataType.FLOAT
_MARGIN = 4  # other inputs may have values larger by this factor
_STATED_TYPES = frozenset(  # an attribute "dtype" or "to" states their output type
    {"Cast", "ConstantOfShape", "EyeLike", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
    | {"Bernoulli", "RandomUniformLike"}
)
_WIDE = frozenset(  # sums, powers and exponentials, which lose precision or overflow in 16 bits
    {"CumSum", "Exp", "Log", "Pow", "Range", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"}
    | {"ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Resize", "Upsample"}
)
_STEM = ".largest_magnitude"


class HalfGraphPass(HalfPass):
    """Compute the main graph in 16 bits where its operators' schemas allow, with casts at the borders.

    Args:
        dtype: FLOAT16 or BFLOAT16.
        keep_float: names of values beyond the type's range.

    Attributes:
        wide_weights: names of weights beyond the type's range, in the latest call.
    """

    oldest_opset: ClassVar[int] = 13  # that of DequantizeLinear with a scale a channel

    def __init__(self, dtype: ir.DataType, *, keep_float: Collection[str] = ()) -> None:
        super().__init__(dtype, keep_float=keep_float)
        self.wide_weights: list[str] = []

    def rewrite(self, graph: ir.Graph) -> None:
        """Decide about every node, then change types and put casts between both kinds."""
        self.wide_weights = []
        version = graph.opset_imports.get("", 0)
        captured = {value for node in graph for inner in subgraphs(node) for value in _outer(inner)}
        chosen = [node for node in graph if self._fits(node, version, captured)]
        outputs = {value for node in chosen for value in node.outputs if _is_float(value)}
        for node in list(graph):
            inside = node in chosen
            for position, value in enumerate(node.inputs):
                if value is None or not _is_float(value):
                    continue
                if inside and self._allowed(node, position, version):
                    node.replace_input_with(position, self._narrowed(graph, node, value, outputs))
                elif value in outputs:
                    node.replace_input_with(position, self.cast(value, _FLOAT, node))
        self.widen_outputs(graph, outputs)
        for value in outputs:
            value.type = ir.TensorType(self.dtype)
        for old in self.stored:
            if not old.uses() and not old.is_graph_output():
                del graph.initializers[str(old.name)]
        self.fired = len(chosen)

    def _fits(self, node: ir.Node, version: int, captured: Collection[ir.Value]) -> bool:
        """Return whether a node computes floats and can do so in 16 bits."""
        if node.domain or node.op_type in _STATED_TYPES | _WIDE or any(True for _ in subgraphs(node)):
            return False
        if self.too_large(node):
            return False
        wide = next((value for value in node.inputs if value is not None and self._is_beyond(value)), None)
        if wide is not None:
            self.wide_weights.append(str(wide.name))
            self.refuse(
                node, f"weight {wide.name} exceeds the range of {self.dtype.name}, so the node stays float"
            )
            return False
        if not all(value is None or isinstance(value.type, ir.TensorType) for value in node.inputs):
            self.refuse(node, "an input is a sequence, or of unknown type")
            return False
        floats = [value for value in node.outputs if value.dtype == _FLOAT]
        if not all(map(_is_float, floats)) or not floats or any(value in captured for value in node.outputs):
            return False
        schema = _schema(node, version)
        return schema is not None and _takes(schema, schema.outputs, 0, self.dtype)

    def _is_beyond(self, value: ir.Value) -> bool:
        """Return whether a weight has finite numbers beyond the type's range; infinities are allowed."""
        tensor = weight(value) if value.dtype == _FLOAT else None
        if tensor is None:
            return False
        content = tensor.numpy()
        finite = np.abs(content[np.isfinite(content)])
        return bool(finite.size) and float(finite.max()) > LARGEST[self.dtype]

    def _allowed(self, node: ir.Node, position: int, version: int) -> bool:
        schema = _schema(node, version)
        return schema is not None and _takes(schema, schema.inputs, position, self.dtype)

    def _narrowed(
        self, graph: ir.Graph, node: ir.Node, value: ir.Value, outputs: Collection[ir.Value]
    ) -> ir.Value:
        tensor = weight(value)
        if tensor is None:
            return value if value in outputs else self.cast(value, self.dtype, node)
        content = tensor  # for the closure: float numbers that fit, see _fits

        def make() -> ir.LazyTensor:
            shape = tuple(content.shape.numpy())
            return lazy(lambda: content.numpy().astype(self.dtype.numpy()), self.dtype, shape)

        return self.store(graph, value, make)


def values_beyond(model: Path, feeds: Sequence[Feed], dtype: ir.DataType) -> list[str]:
    """Return the values of a saved float graph whose magnitude on samples exceeds 1/4 of a type's range."""
    loaded = read_onnx(model)
    ShapeInferencePass()(loaded)
    names = []
    for node in list(loaded.graph):
        for value in node.outputs:
            if _is_float(value):
                magnitudes = ir.node("Abs", [value])
                largest = ir.node("ReduceMax", [magnitudes.outputs[0]], {"keepdims": 0})
                largest.outputs[0].name = f"{value.name}{_STEM}"
                loaded.graph.extend([magnitudes, largest])
                names.append(f"{value.name}{_STEM}")
    reader, found = GraphValues(loaded, names, model.parent), dict.fromkeys(names, 0.0)
    for feed in feeds:
        for name, magnitude in reader.run(feed).items():
            found[name] = max(found[name], float(magnitude))
    limit = LARGEST[dtype] / _MARGIN
    return [name.removesuffix(_STEM) for name, largest in found.items() if not largest <= limit]


def check_kernels(model: ir.Model, method: str, folder: Path) -> None:
    """Check that onnxruntime's CPU provider can run the model; it inserts casts for fp16, but not for bf16.

    Raises:
        GraphError: it cannot; the message holds onnxruntime's reason.
    """
    try:
        GraphValues(model, [str(output.name) for output in model.graph.outputs], folder)
    except GraphError as error:
        hint = "; try fp16" if method == "bf16" else ""
        raise GraphError(
            f"onnxruntime's CPU provider cannot run this model in {method}{hint}: {error}"
        ) from error


def half_type(method: str) -> ir.DataType:
    """Return the type of a method.

    Raises:
        UsageError: the method is neither fp16 nor bf16.
    """
    if method not in HALF_TYPES:
        raise UsageError(f"half precision must be {' or '.join(HALF_TYPES)}, found '{method}'")
    return HALF_TYPES[method]


def _outer(graph: ir.Graph) -> list[ir.Value]:
    """Return the values that a subgraph reads from the graphs around it."""
    read = [value for node in graph.all_nodes() for value in node.inputs if value is not None]
    return [value for value in [*read, *graph.outputs] if value.graph is not graph]


def _is_float(value: ir.Value) -> bool:
    """Return whether a value is a tensor of float32; a sequence of such is not."""
    return value.dtype == _FLOAT and isinstance(value.type, ir.TensorType)


def _schema(node: ir.Node, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def _takes(
    schema: onnx.defs.OpSchema,
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter],
    position: int,
    dtype: ir.DataType,
) -> bool:
    """Return whether an operator's schema allows a type at a position; the last parameter may be variadic."""
    if not parameters:
        return False
    named: Mapping[str, Sequence[str]] = {
        one.type_param_str: one.allowed_type_strs for one in schema.type_constraints
    }
    kind = parameters[min(position, len(parameters) - 1)].type_str
    return f"tensor({dtype.name.lower()})" in named.get(kind, (kind,))
