"""Compute consecutive operators of carryall's CPU kernels as one operator, ``Chain``.

onnxruntime begins and ends a parallel section for each operator. Most operators of a decoding step are
shorter than that: a chain's threads enter once (``providers/native/sources/chain.h``).
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import add_initializer, insert, int_attribute, replace, subgraphs
from ...passes.base import GraphPass
from . import steps
from .groups import convex_groups
from .program import ChainProgram

DOMAIN, OPERATOR = "carryall", "Chain"
_LEAST = 2  # products and attentions
_LEAST_RANK = 2  # of rows


class ChainPass(GraphPass):
    """Replace every group of at least two products or attentions, with what is between them.

    Args:
        approximate: see ``steps.is_supported``.
    """

    def __init__(self, *, approximate: bool = False) -> None:
        super().__init__()
        self._approximate = approximate

    def _is_step(self, node: ir.Node) -> bool:
        return steps.is_supported(node, approximate=self._approximate)

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the groups, then order the graph again."""
        if any(True for node in graph for _ in subgraphs(node)):
            return
        for number, nodes in enumerate(convex_groups(graph, self._is_step)):
            if sum((node.domain, node.op_type) in steps.WORK for node in nodes) < _LEAST:
                continue
            reason = _misfit(nodes)
            if reason is not None:
                self.refuse(nodes[0], reason)
                continue
            _replace(graph, nodes, f"chain_{number}")
            self.fired += 1
        if self.fired:
            graph.sort()


def _misfit(nodes: list[ir.Node]) -> str | None:
    """Return why the rows of a group may not be the same ones, None if they are."""
    computed = {output for node in nodes for output in node.outputs}
    outside = dict.fromkeys(x for node in nodes for x in steps.row_inputs(node) if x not in computed)
    shapes = [value.shape for value in outside]
    if any(shape is None or len(shape) < _LEAST_RANK for shape in shapes):
        return "the shapes of its rows are not known"
    if len({tuple(map(str, (shape or ())[:-1])) for shape in shapes}) > 1:
        return "its rows have different leading axes"
    cut = [output for node in nodes if steps.is_part(node) for output in node.outputs]
    return next(
        (f"{value.name} is read outside of it" for value in cut if _read_outside(value, computed)), None
    )


def _read_outside(value: ir.Value, made: set[ir.Value]) -> bool:
    readers = (use.node for use in value.uses())
    return value.is_graph_output() or any(not made.intersection(node.outputs) for node in readers)


def _replace(graph: ir.Graph, nodes: list[ir.Node], name: str) -> None:
    computed = {output for node in nodes for output in node.outputs}
    outputs = [
        (output, width)
        for node in nodes
        if not steps.is_part(node)
        for output, width in zip(node.outputs, steps.widths(node), strict=True)
        if _read_outside(output, computed)
    ]
    program = ChainProgram(outputs, _last_reads(nodes))
    for number, node in enumerate(nodes):
        steps.write(node, program)
        program.end(number)
    numbers = add_initializer(graph, f"{name}.program", program.tensor())
    ranks = {name: max(int_attribute(node, name, 0) for node in nodes) for name in ("rank", "ranks")}
    chain = insert(
        nodes[-1], OPERATOR, [numbers, *program.inputs], ranks, domain=DOMAIN, num_outputs=len(outputs)
    )
    chain.name = name
    for (old, _), new in zip(outputs, chain.outputs, strict=True):
        replace(old, new)
    for node in reversed(nodes):
        graph.remove(node, safe=True)


def _last_reads(nodes: list[ir.Node]) -> dict[ir.Value, int]:
    """Return the number of the last node that reads each value, or a part of it."""
    last = {output: number for number, node in enumerate(nodes) for output in node.outputs}
    for number, node in enumerate(nodes):
        last |= {value: number for value in node.inputs if value in last}
    for node in reversed(nodes):
        source = node.inputs[0]
        if steps.is_part(node) and source in last:
            last[source] = max(last[source], *(last[output] for output in node.outputs))
    return last
