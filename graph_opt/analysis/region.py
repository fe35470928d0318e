"""Regions: the nodes between some input values and one result, evaluated to find out what they compute.

A fusion proposes a region and an operator. The region is replaced only if both give the same numbers on
random inputs. So the region may be written in any way, and a wrong proposal is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..graph.edit import hold_in_memory, nodes_of, weight

Array = npt.NDArray[Any]
_GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_MAX_NODES = 96
_MAX_CONSTANT = 1 << 16  # elements; excludes weight matrices


class Region:
    """The nodes between ``inputs`` and ``output``; created by ``region``."""

    def __init__(
        self,
        inputs: Sequence[ir.Value],
        output: ir.Value,
        nodes: Sequence[ir.Node],
        constants: Sequence[ir.Value],
        *,
        in_float: bool = False,
    ) -> None:
        self.in_float = in_float
        self.inputs, self.output, self.nodes, self.constants = inputs, output, nodes, constants
        self.failure: str | None = None

    def __call__(self, *arrays: Array) -> Array:
        """Evaluate the region on one array per input.

        Returns:
            The result. If the evaluation fails, an empty array, and ``failure`` holds the reason.
        """
        try:
            return _evaluate([self], arrays)[0]
        except Exception as error:  # noqa: BLE001 -- the evaluator raises numpy's errors of any type
            self.failure = f"it cannot be evaluated on probe inputs: {error}".splitlines()[0]
            return np.empty(0, np.float32)

    def numbers(self) -> list[float]:
        """Return the finite scalar float constants of the region."""
        contents = [value.const_value.numpy() for value in self.constants if value.const_value is not None]
        return [
            float(x.item()) for x in contents if x.size == 1 and x.dtype.kind == "f" and np.isfinite(x).all()
        ]


def evaluate_together(parts: Sequence[Region], *arrays: Array) -> list[Array]:
    """Evaluate regions with the same inputs; return [] if the evaluation of one fails."""
    try:
        return _evaluate(parts, arrays) if parts else []
    except Exception:  # noqa: BLE001 -- as above
        return []


def _evaluate(parts: Sequence[Region], arrays: Sequence[Array]) -> list[Array]:
    owner, inputs = parts[0].nodes[0].graph, parts[0].inputs
    view = ir.GraphView(
        inputs,
        [part.output for part in parts],
        nodes=list(dict.fromkeys(node for part in parts for node in part.nodes)),
        initializers=list(dict.fromkeys(value for part in parts for value in part.constants)),
        opset_imports={} if owner is None else owner.opset_imports,
    )
    graph = view.clone()
    hold_in_memory(graph)
    if any(part.in_float for part in parts):
        _widen(graph)
    from onnx.reference import ReferenceEvaluator  # slow to import

    evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=11)))
    names = [str(value.name) for value in inputs]
    with np.errstate(all="ignore"):
        found = evaluator.run(None, dict(zip(names, arrays, strict=True)))
    return [np.asarray(one) for one in found]


def _widen(graph: ir.Graph) -> None:
    """Replace 16-bit floats by float32 in constants and casts."""
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype in _HALF:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in nodes_of(graph, "Cast"):
        if node.attributes["to"].as_int() in _HALF:
            node.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT.value))


def region(
    inputs: Sequence[ir.Value], output: ir.Value, *, max_nodes: int = _MAX_NODES, in_float: bool = False
) -> Region | str:
    """Return the region between ``inputs`` and ``output``, or why there is none.

    Args:
        inputs: the only values, besides small constants, that the result may depend on.
        output: the result.
        max_nodes: maximum number of nodes.
        in_float: evaluate nodes of 16-bit types in float32.
    """
    ends = set(inputs)
    order: dict[ir.Node, None] = {}
    constants: dict[ir.Value, None] = {}
    met: set[ir.Node] = set()
    stack: list[tuple[ir.Value, bool]] = [(output, False)]
    while stack:
        value, ready = stack.pop()
        node = value.producer()
        if value in ends or (node in order if node is not None else value in constants):
            continue
        if node is None:
            tensor = weight(value)
            if tensor is None or tensor.size > _MAX_CONSTANT:
                return f"it also depends on {value.name}"
            constants[value] = None
        elif ready:
            order[node] = None
        elif any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
            return f"it contains {node.op_type}, which has a subgraph"
        elif node.domain or (node not in met and len(met) >= max_nodes):
            return f"it contains {node.domain}.{node.op_type}" if node.domain else "it is too large"
        else:
            met.add(node)
            stack.append((value, True))
            stack.extend((operand, False) for operand in node.inputs if operand is not None)
    if not order:
        return "it is empty"
    return Region(inputs, output, list(order), list(constants), in_float=in_float)


def close(actual: Array, expected: Array, tolerance: float = 2e-5) -> bool:
    """Return whether two float32 results are equal up to rounding: shape, and values within ``tolerance``."""
    if actual.shape != expected.shape:
        return False
    return bool(
        np.allclose(actual, expected, rtol=tolerance, atol=tolerance * max(1e-30, np.abs(expected).max()))
    )
