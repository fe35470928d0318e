"""Which execution provider runs which node of an opened session, and whether that is what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

# Ask for it in the session's configuration; onnxruntime 1.24 and newer.
RECORD = "session.record_ep_graph_assignment_info"
# ONNX Runtime leaves arithmetic on shapes to the CPU whatever the provider (core/framework/
# fallback_cpu_capability.cc): a copy of a few integers would cost more than computing them.
_SHAPE_OPERATORS = frozenset(
    {
        *("Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Gather"),
        *("Greater", "Less", "Max", "Min", "Mul", "Not", "Range", "ReduceMax", "ReduceMin", "ReduceProd"),
        *("ReduceSum", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze", "Where"),
    }
)
LARGE = 4096  # bytes of a weight that no arithmetic on shapes reads
_CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node as onnxruntime runs it, after its own optimizations."""

    op_type: str
    domain: str
    name: str

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"{kind} {self.name}".strip()


def placement(session: Any) -> dict[str, list[PlacedNode]] | None:
    """Nodes by execution provider; None where onnxruntime is too old to tell.

    Args:
        session: opened with ``RECORD``.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    parts = session.get_provider_graph_assignment_info()
    placed: dict[str, list[PlacedNode]] = {}
    for part in parts:
        nodes = [PlacedNode(node.op_type, node.domain, node.name) for node in part.get_nodes()]
        placed.setdefault(part.ep_name, []).extend(nodes)
    return placed


def stray_nodes(
    placed: Mapping[str, Sequence[PlacedNode]],
    asked: Collection[str],
    heavy: Callable[[], Collection[str]],
) -> list[PlacedNode]:
    """Nodes that run elsewhere than asked and do more than arithmetic on shapes.

    Args:
        placed: nodes by execution provider.
        asked: execution providers.
        heavy: names of nodes that do more, whatever their operator.
    """
    strays: list[PlacedNode] = []
    suspects: list[PlacedNode] = []
    for name, nodes in placed.items():
        for node in nodes if name not in asked else ():
            (suspects if name == _CPU and _may_be_shape_arithmetic(node) else strays).append(node)
    names = heavy() if suspects else ()
    return strays + [node for node in suspects if node.name in names]


def heavy_nodes(model: Path | bytes) -> set[str]:
    """Names of nodes that read a large weight or compute float tensors, as no arithmetic on shapes does."""
    content = ir.from_proto(onnx.load_from_string(model)) if isinstance(model, bytes) else ir.load(model)
    found = set()
    for node in content.graph.all_nodes():
        tensors = [value.const_value for value in node.inputs if value is not None]
        large = any(tensor is not None and tensor.nbytes > LARGE for tensor in tensors)
        if large or any(
            value.dtype is not None and value.dtype.is_floating_point() for value in node.outputs
        ):
            found.add(node.name or "")
    return found


def _is_data(value: ir.Value) -> bool:
    """Whether a value is a float tensor of two axes or more; arithmetic on shapes has one at most."""
    floats = value.dtype is not None and value.dtype.is_floating_point()
    return floats and value.shape is not None and len(value.shape) > 1


def _may_be_shape_arithmetic(node: PlacedNode) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in _SHAPE_OPERATORS
