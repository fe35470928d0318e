"""Where the nodes of an opened model run, and how many bytes of weights lie there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class ProviderShare:
    """One execution provider's part of a model.

    Args:
        provider: onnxruntime's name of it.
        nodes: how many nodes it runs.
        operators: how many of each operator, most first; custom domains as ``domain::Operator``.
        weight_bytes: bytes of the weights that its nodes read.
    """

    provider: str
    nodes: int
    operators: dict[str, int]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The parts of all providers, the asked ones first, and why nodes lie elsewhere than on the first.

    Args:
        shares: one a provider that runs anything.
        unplaced_bytes: weights whose node onnxruntime renamed or replaced, so that nobody can say.
        reasons: one sentence an operator that the first asked provider left to another.
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


def weight_bytes_by_node(model: ir.Model) -> dict[str, int]:
    """Bytes of initializers that each named node of the main graph reads first; sharing counts once."""
    found: dict[str, int] = defaultdict(int)
    for value in model.graph.initializers.values():
        reader = next((node for node, _ in value.uses()), None)
        if value.const_value is not None and reader is not None:
            found[reader.name or ""] += value.const_value.nbytes
    return dict(found)


def placement(assigned: Iterable[Any], asked: list[str], weights: Mapping[str, int]) -> Placement:
    """Sum up what onnxruntime assigned.

    Args:
        assigned: ``InferenceSession.get_provider_graph_assignment_info()``.
        asked: execution providers, best first.
        weights: of ``weight_bytes_by_node``.
    """
    operators: dict[str, Counter[str]] = defaultdict(Counter)
    held: dict[str, int] = defaultdict(int)
    placed = set()
    for part in assigned:
        for node in part.get_nodes():
            operators[part.ep_name][_operator(node)] += 1
            if node.name and node.name not in placed:
                placed.add(node.name)
                held[part.ep_name] += weights.get(node.name, 0)
    order = {name: i for i, name in enumerate(asked)}
    names = sorted(operators, key=lambda name: order.get(name, len(order)))
    shares = [
        ProviderShare(name, operators[name].total(), dict(operators[name].most_common()), held[name])
        for name in names
    ]
    reasons = _reasons(asked[0], operators) if asked else []
    return Placement(tuple(shares), sum(weights.values()) - sum(held.values()), tuple(reasons))


def _reasons(first: str, operators: Mapping[str, Counter[str]]) -> list[str]:
    own = operators.get(first, Counter())
    reasons = []
    for provider, counts in operators.items():
        if provider == first:
            continue
        for name, count in counts.most_common():
            took = own[name]
            why = (
                f"{first} took {took} others of the kind, so types or shapes decide"
                if took
                else f"{first} took none of the kind"
            )
            reasons.append(f"{count} {name} run on {provider}: {why}")
    return reasons


def _operator(node: Any) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)
