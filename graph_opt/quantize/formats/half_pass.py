"""Common parts of the passes to 16 bits: limits of the types, casts, and float outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ....errors import UsageError
from ...graph.edit import insert, return_instead
from ...passes.base import GraphPass
from ...passes.shape_inference import ShapeInferencePass

HALF_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
LARGEST = {  # finite magnitudes
    ir.DataType.FLOAT16: float(np.finfo(np.float16).max),
    ir.DataType.BFLOAT16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
}
_FLOAT = ir.DataType.FLOAT


class HalfPass(GraphPass):
    """Rewrite a graph in a 16-bit type.

    Args:
        dtype: FLOAT16 or BFLOAT16.
        keep_float: names of values that exceed the type's range.

    Raises:
        UsageError: the type is another one.
    """

    def __init__(self, dtype: ir.DataType, *, keep_float: Collection[str] = ()) -> None:
        super().__init__()
        if dtype not in LARGEST:
            raise UsageError(f"half precision must be FLOAT16 or BFLOAT16, found {dtype.name}")
        self.dtype = dtype
        self.keep_float = frozenset(keep_float)
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.stored: dict[ir.Value, ir.Value] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer the types of the values and rewrite the main graph."""
        ShapeInferencePass()(model)
        self.casts, self.stored = {}, {}
        return super().call(model)

    def too_large(self, node: ir.Node) -> bool:
        """Return whether a node reads or computes a value that must stay float, and record the refusal."""
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        large = next((value.name for value in values if value.name in self.keep_float), None)
        if large is not None:
            self.refuse(node, f"{large} exceeds the range of {self.dtype.name}, so the node stays float")
        return large is not None

    def store(self, graph: ir.Graph, value: ir.Value, make: Callable[[], ir.LazyTensor]) -> ir.Value:
        """Return the weight in 16 bits; ``make`` computes it once."""
        if value not in self.stored:
            content = make()
            content.name = f"{value.name}.{self.dtype.name.lower()}"
            kind = ir.TensorType(self.dtype)
            new = ir.Value(name=content.name, type=kind, shape=content.shape, const_value=content)
            graph.register_initializer(new)
            self.stored[value] = new
        return self.stored[value]

    def cast(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """Return the value in another type; it is cast once."""
        if (value, dtype) not in self.casts:
            result = insert(before, "Cast", [value], {"to": dtype.value}).outputs[0]
            result.type, result.shape = ir.TensorType(dtype), value.shape
            self.casts[value, dtype] = result
        return self.casts[value, dtype]

    def widen_outputs(self, graph: ir.Graph, half: Collection[ir.Value]) -> None:
        """Return the ``half`` outputs as float under their original names."""
        for output in list(graph.outputs):
            if output not in half:
                continue
            cast = ir.node("Cast", [output], {"to": _FLOAT.value})
            graph.append(cast)
            result = cast.outputs[0]
            result.type, result.shape = ir.TensorType(_FLOAT), output.shape
            return_instead(output, result, f"{output.name}.{self.dtype.name.lower()}")
