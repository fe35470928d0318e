"""Write ONNX nodes, named after the checkpoint's modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..contract import PRODUCER

OPSET = 23  # the first opset with Attention, RotaryEmbedding and RMSNormalization
IR_VERSION = 11  # released with opset 23

Attribute = int | float | str | Sequence[int]


class GraphWriter:
    """An ONNX graph under construction.

    Nodes are named ``<scope>/<operator>``, where the scope is a module of the checkpoint. A value has the
    name of its node.
    """

    def __init__(self, name: str, opset: int = OPSET) -> None:
        self.graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": opset})
        self._scope: list[str] = []
        self._name_counts: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes and weights written in this context with ``name`` and a dot."""
        self._scope.append(name)
        yield
        self._scope.pop()

    @contextmanager
    def unscoped(self, name: str) -> Iterator[None]:
        """Replace the current scopes by ``name``: for nodes that several modules share."""
        outer, self._scope = self._scope, [name]
        yield
        self._scope = outer

    def qualified(self, name: str = "") -> str:
        """Return ``name`` prefixed with the current scopes."""
        return ".".join([*self._scope, name] if name else self._scope)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add a graph input."""
        value = ir.val(name, dtype, ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        """Make ``value`` a graph output called ``name``."""
        value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
        self.graph.outputs.append(value)

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Attribute) -> ir.Value:
        """Append a node with one output."""
        return self.ops(op_type, *inputs, num_outputs=1, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, num_outputs: int, **attributes: Attribute
    ) -> Sequence[ir.Value]:
        """Append a node with ``num_outputs`` outputs."""
        return self._append("", op_type, inputs, num_outputs, attributes)

    def foreign_op(
        self, domain: str, op_type: str, *inputs: ir.Value | None, **attributes: Attribute
    ) -> ir.Value:
        """Append a node of another domain than ONNX's, with one output."""
        self.graph.opset_imports.setdefault(domain, 1)
        return self._append(domain, op_type, inputs, 1, attributes)[0]

    def _append(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        num_outputs: int,
        attributes: Mapping[str, Attribute],
    ) -> Sequence[ir.Value]:
        name = self._unique(f"{self.qualified()}/{op_type}" if self._scope else op_type)
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = name if i == 0 else f"{name}.{i}"
        self.graph.append(node)
        return node.outputs

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Register ``tensor`` under its name; if the name is registered already, return that value."""
        name = tensor.name or ""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        value = ir.val(name, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def constant(self, value: npt.ArrayLike, dtype: type[np.generic], name: str) -> ir.Value:
        """Return a small constant; equal constants share one initializer."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializer(ir.tensor(array, name=self._unique(f"constants/{name}")))
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """Return a 1-D int64 constant."""
        return self.constant(values, np.int64, "_".join(map(str, values)).replace("-", "minus"))

    def model(self) -> ir.Model:
        """Return the model."""
        return ir.Model(self.graph, ir_version=IR_VERSION, producer_name=PRODUCER)

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self._name_counts:
            self._name_counts[name] += 1
            unique = f"{name}_{self._name_counts[name]}"
        self._name_counts[unique] = 0
        return unique
