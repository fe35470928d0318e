"""The placement of an open session: which execution provider runs which nodes and weights."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..records import dataclass

if TYPE_CHECKING:
    import onnx_ir as ir

# The session configuration entry that records the placement; onnxruntime 1.24 and newer.
RECORD = "session.record_ep_graph_assignment_info"
# ONNX Runtime runs shape arithmetic on the CPU for every provider
# (core/framework/fallback_cpu_capability.cc), since copying a few integers costs more than computing them.
_SHAPE_OPERATORS = frozenset(
    {
        *("Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Gather"),
        *(
            "Greater",
            "Less",
            "Max",
            "Min",
            "Mul",
            "Neg",
            "Not",
            "Range",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
        ),
        *("ReduceSum", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze", "Where"),
    }
)
LARGE = 4096  # bytes; shape arithmetic does not read larger weights
_CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node as onnxruntime runs it, after its own optimizations."""

    op_type: str
    domain: str
    name: str

    def __str__(self) -> str:
        return f"{self.operator} {self.name}".strip()

    @property
    def operator(self) -> str:
        """The operator, as ``domain.Operator`` if it is not a standard one."""
        return self.op_type if self.domain in ("", "ai.onnx") else f"{self.domain}.{self.op_type}"


@dataclass(frozen=True, slots=True)
class ProviderShare:
    """One execution provider's part of a model.

    Args:
        provider: onnxruntime's name of the execution provider.
        nodes: number of nodes, after onnxruntime's own optimizations.
        operators: count of each operator, in descending order; custom domains as ``domain.Operator``.
        weight_bytes: bytes of the weights that its nodes read.
    """

    provider: str
    nodes: int
    operators: dict[str, int]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The parts of all execution providers, and why some nodes do not run on the first requested one.

    Args:
        shares: one per provider with nodes, requested ones first.
        unplaced_bytes: bytes of weights whose node onnxruntime renamed or replaced, so their place is
            unknown.
        reasons: one sentence per operator that the first requested provider does not run.
    """

    shares: tuple[ProviderShare, ...]
    unplaced_bytes: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{share.provider}: {share.nodes} nodes, {share.weight_bytes:,} bytes of weights "
            f"({', '.join(f'{count} {name}' for name, count in share.operators.items())})"
            for share in self.shares
        ]
        if self.unplaced_bytes:
            lines.append(f"{self.unplaced_bytes:,} bytes of weights belong to nodes that were rewritten")
        return "\n".join([*lines, *self.reasons])


def placed_nodes(session: Any) -> dict[str, list[PlacedNode]] | None:
    """Return the nodes by execution provider; None if onnxruntime is older than 1.24.

    Args:
        session: a session opened with ``RECORD``.
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
    """Return the nodes that do not run on a requested provider and are not shape arithmetic.

    Args:
        placed: nodes by execution provider.
        asked: the requested execution providers.
        heavy: returns names of nodes that are not shape arithmetic although their operator could be.
    """
    strays: list[PlacedNode] = []
    suspects: list[PlacedNode] = []
    for name, nodes in placed.items():
        for node in nodes if name not in asked else ():
            (suspects if name == _CPU and _may_be_shape_arithmetic(node) else strays).append(node)
    names = heavy() if suspects else ()
    return strays + [node for node in suspects if node.name in names]


def summarise(
    placed: Mapping[str, Sequence[PlacedNode]],
    asked: Sequence[str],
    weights: Mapping[str, int],
    heavy: Callable[[], Collection[str]],
) -> Placement:
    """Summarise the placement of nodes and weights.

    Args:
        placed: nodes by execution provider.
        asked: the requested execution providers, in order of priority.
        weights: the result of ``weight_bytes_by_node``.
        heavy: returns the result of ``heavy_nodes``.
    """
    held: dict[str, int] = {}
    counted: set[str] = set()
    for name, nodes in placed.items():
        own = {node.name for node in nodes} - counted - {""}
        held[name] = sum(weights.get(node, 0) for node in own)
        counted |= own
    operators = {name: Counter(node.operator for node in nodes) for name, nodes in placed.items()}
    order = {name: i for i, name in enumerate(asked)}
    shares = [
        ProviderShare(name, operators[name].total(), dict(operators[name].most_common()), held[name])
        for name in sorted(placed, key=lambda name: order.get(name, len(order)))
    ]
    reasons = _reasons(asked[0], placed, heavy) if asked else []
    return Placement(tuple(shares), sum(weights.values()) - sum(held.values()), tuple(reasons))


def _reasons(
    first: str, placed: Mapping[str, Sequence[PlacedNode]], heavy: Callable[[], Collection[str]]
) -> list[str]:
    took = Counter(node.operator for node in placed.get(first, ()))
    reasons = []
    for provider, nodes in placed.items():
        if provider == first:
            continue
        strays = Counter(node.operator for node in stray_nodes({provider: nodes}, [first], heavy))
        for name, count in strays.most_common():
            why = (
                f"{first} runs {took[name]} others of this operator, so types or shapes decide"
                if took[name]
                else f"{first} runs none of this operator"
            )
            reasons.append(f"{count} {name} run on {provider}: {why}")
        rest = len(nodes) - strays.total()
        if rest:
            reasons.append(f"{rest} nodes of shape arithmetic run on {provider}, as onnxruntime places them")
    return reasons


def read_model(model: object) -> ir.Model:
    """Return a model given as a path, bytes, ``ModelProto`` or ``ir.Model``; it must not be changed."""
    import onnx
    import onnx_ir as ir

    from ..graph_opt.graph.load import read_model as read_file

    if isinstance(model, ir.Model):
        return model
    if isinstance(model, bytes):
        model = onnx.load_from_string(model)
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    return read_file(Path(os.fspath(model)))  # type: ignore[call-overload]


def heavy_nodes(model: Path | bytes | ir.Model) -> set[str]:
    """Return the names of nodes that read a large weight or output float tensors: no shape arithmetic."""
    names = set()
    for node in read_model(model).graph.all_nodes():
        tensors = [value.const_value for value in node.inputs if value is not None]
        large = any(tensor is not None and tensor.nbytes > LARGE for tensor in tensors)
        if large or any(
            value.dtype is not None and value.dtype.is_floating_point() for value in node.outputs
        ):
            names.add(node.name or "")
    return names


def weight_bytes_by_node(model: ir.Model) -> dict[str, int]:
    """Return the bytes of initializers by node; a shared initializer counts for its first reader only."""
    sizes: dict[str, int] = defaultdict(int)
    for value in model.graph.initializers.values():
        reader = next((node for node, _ in value.uses()), None)
        if value.const_value is not None and reader is not None:
            sizes[reader.name or ""] += value.const_value.nbytes
    return dict(sizes)


def _may_be_shape_arithmetic(node: PlacedNode) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in _SHAPE_OPERATORS
