"""Compare the structure of two graphs; names of nodes and inner values are ignored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.graph_facts import count_operators
from .match_nodes import NodeMatching, match_nodes
from .structural_hash import attribute_hash, attribute_text, constant_of

_CHUNK = 1 << 22  # elements compared at a time

Pairs = list[tuple[ir.Value, ir.Value]]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A matched node and its differences."""

    op_type: str
    a: str
    b: str
    changes: list[str]


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A weight of matched nodes: its names in both graphs, and its difference."""

    a: str
    b: str
    change: str


@dataclass(slots=True)
class GraphDiff:
    """The differences of two graphs; all lists are empty for equal structures.

    Attributes:
        matched: number of matched nodes.
        interface: differences of opsets, inputs and outputs, as text.
        operators: counts of each operator in both graphs, if they differ.
        only_a, only_b: operator and name of unmatched nodes.
        nodes: matched nodes whose attributes or operands differ.
        weights: matched weights whose type, shape or content differ.
    """

    matched: int = 0
    interface: list[str] = field(default_factory=list)
    operators: dict[str, tuple[int, int]] = field(default_factory=dict)
    only_a: list[tuple[str, str]] = field(default_factory=list)
    only_b: list[tuple[str, str]] = field(default_factory=list)
    nodes: list[NodeChange] = field(default_factory=list)
    weights: list[WeightChange] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        return not (
            self.interface or self.operators or self.only_a or self.only_b or self.nodes or self.weights
        )


def diff(a: ir.Model, b: ir.Model) -> GraphDiff:
    """Compare two models. Matched weights are compared in pieces of 4 M elements."""
    result = GraphDiff(interface=_opsets(a, b), operators=_operators(a, b))
    _compare_graphs(a.graph, b.graph, result, "")
    for key in dict.fromkeys([*a.functions, *b.functions]):
        if key in a.functions and key in b.functions:
            _compare_graphs(a.functions[key].graph, b.functions[key].graph, result, f"function {key[1]}: ")
        else:
            result.interface.append(
                f"function {key[0]}::{key[1]} only in {'A' if key in a.functions else 'B'}"
            )
    return result


def _compare_graphs(a: ir.Graph, b: ir.Graph, result: GraphDiff, where: str) -> None:
    inputs, outputs = _pair(a.inputs, b.inputs), _pair(a.outputs, b.outputs)
    result.interface += [f"{where}input {text}" for text in _interface(a.inputs, b.inputs, inputs)]
    result.interface += [f"{where}output {text}" for text in _interface(a.outputs, b.outputs, outputs)]
    matching = match_nodes(a, b, inputs, outputs)
    result.matched += len(matching.pairs)
    for nodes, only in zip(matching.unmatched(), (result.only_a, result.only_b), strict=True):
        only += [(_operator(node), str(node.name or "")) for node in nodes]
    seen: set[tuple[ir.Value, ir.Value]] = set()
    for node, other in matching.pairs.items():
        changes = [*_attribute_changes(node, other), *_operand_changes(node, other, matching)]
        if changes:
            names = str(node.name or ""), str(other.name or "")
            result.nodes.append(NodeChange(_operator(node), *names, changes))
        result.weights += _weight_changes(node, other, seen)
    for value, twin in outputs:
        if matching.values.get(value, twin) is not twin:
            result.interface.append(f"{where}output {value.name} is computed by another node")


def _pair(a: Sequence[ir.Value], b: Sequence[ir.Value]) -> Pairs:
    """Pair inputs or outputs by name, the rest by type in order."""
    named = {value.name: value for value in b}
    pairs = [(value, named[value.name]) for value in a if value.name in named]
    left = [value for value in a if value.name not in named]
    taken = {other for _, other in pairs}
    right = [value for value in b if value not in taken]
    for value in left:
        same = next((other for other in right if _form(other) == _form(value)), None)
        if same is not None:
            pairs.append((value, same))
            right.remove(same)
    return pairs


def _interface(a: Sequence[ir.Value], b: Sequence[ir.Value], pairs: Pairs) -> Iterator[str]:
    paired = {value for pair in pairs for value in pair}
    yield from (f"{_describe(value)} only in A" for value in a if value not in paired)
    yield from (f"{_describe(value)} only in B" for value in b if value not in paired)
    for left, right in pairs:
        if left.name != right.name:
            yield f"{left.name} is named {right.name}"
        if _form(left) != _form(right):
            yield f"{_describe(left)} is {_form(right)}"


def _form(value: ir.Value) -> str:
    dtype = value.dtype.name if value.dtype is not None else "untyped"
    return f"{dtype} {value.shape if value.shape is not None else 'of unknown rank'}"


def _describe(value: ir.Value) -> str:
    return f"{value.name} {_form(value)}"


def _operator(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _opsets(a: ir.Model, b: ir.Model) -> list[str]:
    domains = sorted({*a.opset_imports, *b.opset_imports})
    versions = [(domain, a.opset_imports.get(domain), b.opset_imports.get(domain)) for domain in domains]
    return [f"opset {domain or 'ai.onnx'}: {old} -> {new}" for domain, old, new in versions if old != new]


def _operators(a: ir.Model, b: ir.Model) -> dict[str, tuple[int, int]]:
    left, right = count_operators(a), count_operators(b)
    counts = {name: (left.get(name, 0), right.get(name, 0)) for name in sorted({*left, *right})}
    return {name: pair for name, pair in counts.items() if pair[0] != pair[1]}


def _attribute_changes(a: ir.Node, b: ir.Node) -> Iterator[str]:
    for name in sorted({*a.attributes, *b.attributes}):
        left, right = a.attributes.get(name), b.attributes.get(name)
        if left is None or right is None:
            texts = [attribute_text(one) if one is not None else "none" for one in (left, right)]
            yield f"{name}: {texts[0]} -> {texts[1]}"
        elif attribute_hash(left) != attribute_hash(right):
            is_graph = left.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            texts = ["", ""] if is_graph else [attribute_text(left), attribute_text(right)]
            yield f"{name}: the graph differs" if is_graph else f"{name}: {texts[0]} -> {texts[1]}"


def _operand_changes(a: ir.Node, b: ir.Node, matching: NodeMatching) -> Iterator[str]:
    """Yield the operands with different sources; constants are compared by content elsewhere."""
    for index in range(max(len(a.inputs), len(b.inputs))):
        left = a.inputs[index] if index < len(a.inputs) else None
        right = b.inputs[index] if index < len(b.inputs) else None
        both_constant = constant_of(left) is not None and constant_of(right) is not None
        matched = None if left is None else matching.values.get(left)
        if (
            not both_constant
            and (left is None or right is None or matched is not right)
            and left is not right
        ):
            yield f"operand {index}: {_source(left)} -> {_source(right)}"
    if len(a.outputs) != len(b.outputs):
        yield f"outputs: {len(a.outputs)} -> {len(b.outputs)}"


def _source(value: ir.Value | None) -> str:
    if value is None:
        return "none"
    producer = value.producer()
    return f"{value.name} of {_operator(producer)}" if producer is not None else str(value.name)


def _weight_changes(a: ir.Node, b: ir.Node, seen: set[tuple[ir.Value, ir.Value]]) -> Iterator[WeightChange]:
    for left, right in zip(a.inputs, b.inputs, strict=False):
        tensors = constant_of(left), constant_of(right)
        if left is None or right is None or tensors[0] is None or tensors[1] is None or (left, right) in seen:
            continue
        seen.add((left, right))
        change = _tensor_change(tensors[0], tensors[1])
        if change is not None:
            yield WeightChange(str(left.name), str(right.name), change)


def _tensor_change(a: ir.TensorProtocol, b: ir.TensorProtocol) -> str | None:
    forms = [f"{tensor.dtype.name} {tensor.shape}" for tensor in (a, b)]
    if forms[0] != forms[1]:
        return f"{forms[0]} -> {forms[1]}"
    left, right = (np.asarray(tensor.numpy()).reshape(-1) for tensor in (a, b))
    differing, largest = 0, 0.0
    for start in range(0, left.size, _CHUNK):
        x, y = left[start : start + _CHUNK], right[start : start + _CHUNK]
        if x.tobytes() != y.tobytes():
            differing += int((x != y).sum())
            if x.dtype.kind not in "OUS":
                largest = max(largest, float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max()))
    return f"{differing} of {left.size} values differ, by {largest:.3g} at most" if differing else None
