"""Fuse GELU, tanh GELU, SiLU (``Mul(x, Sigmoid(x))``), hard swish and hard sigmoid into their canonical form.

Hendrycks & Gimpel, "Gaussian Error Linear Units" (2016); Howard et al., "Searching for MobileNetV3" (2019).
The search starts at Erf, Tanh, Sigmoid, Clip or HardSigmoid; the function around it is recognised by its
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import erf

import numpy as np
import onnx_ir as ir

from ...analysis.region import Array, close, region
from ...graph.edit import insert, remove_unused, replace
from ..base import GraphPass

_ANCHORS = frozenset({"Clip", "Erf", "HardSigmoid", "Sigmoid", "Tanh"})
_ELEMENTWISE = _ANCHORS | {"Add", "Sub", "Mul", "Div", "Pow", "Neg", "Cast", "Sqrt"}
_MAX_STEPS = 10
_NEAR = np.linspace(-6, 6, 97, dtype=np.float32)
# Points beyond, where a function may be clipped. Each group has one magnitude, because errors are compared
# relative to the largest value.
_FAR = np.array([[-9, -7, 7, 9], [-40, -20, 20, 40], [-3e3, -1e3, 1e3, 3e3]], np.float32)
_POINTS = np.concatenate([_NEAR, _FAR.reshape(-1)])


class FuseActivationPass(GraphPass):
    """Replace activations that are written as several nodes."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Erf, Tanh, Sigmoid, Clip and HardSigmoid."""
        for node in list(graph):
            if node.graph is graph and node.op_type in _ANCHORS and not node.domain:
                self.fired += _fuse(graph, node)


def _fuse(graph: ir.Graph, anchor: ir.Node) -> bool:
    for x in _sources(anchor):
        for output in _results(anchor):
            if x.shape is None or output.shape is None or x.shape != output.shape:
                continue
            part = region([x], output)
            if (
                isinstance(part, str)
                or len(part.nodes) < 2
                or not all(node.op_type in _ELEMENTWISE for node in part.nodes)
                or any(c.const_value.size > 1 for c in part.constants if c.const_value)
            ):
                continue
            known = _recognise(part(_POINTS))
            last = output.producer()
            if known is None or last is None or (known == "silu" and len(part.nodes) == 2):
                continue
            replace(output, _insert(last, known, x))
            remove_unused(graph, last)
            return True
    return False


def _insert(before: ir.Node, known: str, x: ir.Value) -> ir.Value:
    match known:
        case "silu":
            return insert(before, "Mul", [x, insert(before, "Sigmoid", [x]).outputs[0]]).outputs[0]
        case "hard swish":
            return insert(before, "HardSwish", [x]).outputs[0]
        case "hard sigmoid":
            return insert(before, "HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5}).outputs[0]
    return insert(before, "Gelu", [x], {"approximate": known}).outputs[0]


def _sources(anchor: ir.Node) -> list[ir.Value]:
    """Return the values upstream of the anchor through elementwise nodes, farthest first."""
    sources: dict[ir.Value, None] = {}
    stack = [value for value in anchor.inputs if value is not None]
    while stack and len(sources) < 2 * _MAX_STEPS:
        value = stack.pop()
        node = value.producer()
        if value in sources or (node is None and not value.is_graph_input()):
            continue
        sources[value] = None
        if node is not None and node.op_type in _ELEMENTWISE and not node.domain:
            stack.extend(operand for operand in node.inputs if operand is not None)
    return list(reversed(sources))


def _results(anchor: ir.Node) -> Iterator[ir.Value]:
    """Yield the values downstream of the anchor through elementwise nodes, farthest first."""
    chain: list[ir.Value] = []
    value = anchor.outputs[0]
    for _ in range(_MAX_STEPS):
        readers = list(value.uses())
        if len(readers) != 1 or value.is_graph_output() or readers[0].node.op_type not in _ELEMENTWISE:
            break
        value = readers[0].node.outputs[0]
        chain.append(value)
    yield from reversed(chain)


def _recognise(values: Array) -> str | None:
    x = _POINTS.astype(np.float64)
    with np.errstate(over="ignore"):
        known = {
            "none": x * 0.5 * (1 + np.array([erf(item / np.sqrt(2)) for item in x])),
            "tanh": x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
            "silu": x / (1 + np.exp(-x)),
            "hard swish": x * np.clip(x / 6 + 0.5, 0, 1),
            "hard sigmoid": np.clip(x / 6 + 0.5, 0, 1),
        }
    return next((name for name, expected in known.items() if _agree(values, expected)), None)


def _agree(values: Array, expected: Array) -> bool:
    if values.shape != expected.shape:
        return False
    cuts = [len(_NEAR), len(_NEAR) + len(_FAR[0]), len(_NEAR) + 2 * len(_FAR[0])]
    pairs = zip(np.split(values, cuts), np.split(expected, cuts), strict=True)
    return all(close(found, wanted, 1e-6) for found, wanted in pairs)
