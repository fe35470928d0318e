"""Merge equal nodes and equal small initializers (common subexpression elimination).

A subgraph can read values of its outer graphs, so a node in a subgraph is also merged with an equal one
outside. Never the reverse, because a branch may not run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...graph.edit import MICROSOFT, replace, subgraphs
from ..base import GraphPass

_DOMAINS = frozenset({"", "ai.onnx.ml", MICROSOFT})  # operators of others may be random or stateful
_RANDOM = frozenset(
    {"RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Multinomial", "Bernoulli"}
    | {"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"}
)
_LARGEST = 64  # elements of a tensor whose content is compared; larger weights keep their names

Known = dict[Hashable, list[ir.Value]]


class MergeDuplicatesPass(GraphPass):
    """Merge duplicates in the main graph, subgraphs and functions.

    Nodes with subgraphs and random operators are not merged.
    """

    oldest_opset: ClassVar[int] = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Merge in every graph of ``model``."""
        self.fired, self.refusals = 0, []
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self.rewrite(graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    def rewrite(self, graph: ir.Graph) -> None:
        """Merge in one graph and its subgraphs."""
        self._merge(graph, {})

    def _merge(self, graph: ir.Graph, outer: Mapping[Hashable, list[ir.Value]]) -> None:
        known = dict(outer)
        for value in list(graph.initializers.values()):
            self._merge_initializer(graph, value, known)
        for node in list(graph):
            for subgraph in subgraphs(node):
                self._merge(subgraph, known)
            key = _key(node)
            if key is None:
                continue
            first = known.setdefault(key, list(node.outputs))
            if first[0] is not node.outputs[0]:
                self._use_instead(graph, node, first)

    def _merge_initializer(self, graph: ir.Graph, value: ir.Value, known: Known) -> None:
        tensor = value.const_value
        if tensor is None or tensor.size > _LARGEST or value.is_graph_input() or value.is_graph_output():
            return
        (first,) = known.setdefault(("initializer", _content(tensor)), [value])
        if first is not value:
            value.replace_all_uses_with(first)
            del graph.initializers[str(value.name)]
            self.fired += 1

    def _use_instead(self, graph: ir.Graph, node: ir.Node, first: list[ir.Value]) -> None:
        for old, new in zip(node.outputs, first, strict=True):
            if old.name and not new.name:  # the first node omits this optional output
                new.name = f"{old.name}_merged"
            replace(old, new)
        graph.remove(node, safe=True)
        self.fired += 1


def _key(node: ir.Node) -> Hashable | None:
    """Return a key that is equal for equal nodes, None for a node that must not be merged."""
    if node.domain not in _DOMAINS or node.op_type in _RANDOM or not node.outputs:
        return None
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        content = _attribute(attribute)
        if content is None:
            return None
        attributes.append((name, content))
    return node.op_identifier(), len(node.outputs), tuple(node.inputs), tuple(attributes)


def _attribute(attribute: ir.Attr) -> Hashable | None:
    if attribute.is_ref():
        return "reference", attribute.ref_attr_name
    match attribute.type:
        case ir.AttributeType.INT | ir.AttributeType.STRING:
            return attribute.type, attribute.value
        case ir.AttributeType.INTS | ir.AttributeType.STRINGS:
            return attribute.type, tuple(attribute.value)
        case ir.AttributeType.FLOAT | ir.AttributeType.FLOATS:
            return attribute.type, np.asarray(attribute.value, np.float64).tobytes()  # -0.0 is not 0.0
        case ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            return _content(tensor) if tensor.size <= _LARGEST else None
        case _:
            return None


def _content(tensor: ir.TensorProtocol) -> Hashable:
    words = tensor.dtype == ir.DataType.STRING
    content = tuple(tensor.numpy().reshape(-1).tolist()) if words else tensor.tobytes()
    return tensor.dtype, tuple(tensor.shape.numpy()), content
