"""A mixture of experts, however written -> its canonical form.

Traces compute every expert on every token with weights that may be 0, or gather each expert's tokens and add
its results in place. A proposal is proven without its weights: experts are replaced by factors, one each, and
what surrounds them must then give the mixture of these factors on random tokens and scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..edit import constant, nodes_of, remove_unused, replace, weight
from ..lazy import shape_of
from ..mixture import Expert, Mixture, find_mixture, gated_mlp
from ..write_mixture import write_mixture
from .base import GraphPass
from .region import Array, Region, close, evaluate_together, region

_BATCH, _SEQUENCE = 2, 5
_NODES_AN_EXPERT = 64
_MAX_CONSTANT = 1 << 16
_MOST_IDLE = 256  # nodes in a row that do not belong to a mixture end it
_MOST_TRIED = 8  # values, from the last on, that may be the mixture
_Mlps = dict[ir.Value, Expert]


@dataclass(frozen=True, slots=True)
class _Routing:
    """A router: of scores [..., experts] for tokens [..., hidden] a TopK chooses."""

    tokens: ir.Value
    scores: ir.Value
    per_token: int
    hidden: int
    count: int
    flattened: bool  # the scores' leading axes are one


class FuseExpertsPass(GraphPass):
    """Replace every mixture that is not in the canonical form."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Look at every TopK of a softmax of a product's results."""
        mixtures = [find_mixture(node) for node in nodes_of(graph, "Split")]
        done = {one.likely for one in mixtures if isinstance(one, Mixture)}
        found = [mlp for node in nodes_of(graph, "Sigmoid") if (mlp := gated_mlp(node)) is not None]
        mlps = {mlp.down.outputs[0]: mlp for mlp in found}
        nodes = list(graph)
        places = {node: place for place, node in enumerate(nodes)}
        for node in nodes_of(graph, "TopK"):
            routing = _routing(node) if mlps and node.inputs[0] not in done else None
            if routing is None:
                continue
            first = routing.tokens.producer()
            reason = _fuse(graph, nodes[places[first] if first is not None else 0 :], routing, mlps)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)


def _routing(choice: ir.Node) -> _Routing | None:
    softmax = _beyond(choice.inputs[0], "Cast")
    producer = softmax.producer() if softmax is not None else None
    if producer is None or producer.op_type != "Softmax":
        return None
    scores = _beyond(producer.inputs[0], "Cast")
    router = scores.producer() if scores is not None else None
    if scores is None or router is None or router.op_type != "MatMul":
        return None
    tokens, asked, matrix = (
        _beyond(router.inputs[0], "Reshape"),
        constant(choice.inputs[1]),
        weight(router.inputs[1]),
    )
    if tokens is None or asked is None or matrix is None or len(matrix.shape) != 2:
        return None
    hidden, count = shape_of(matrix)
    flattened = tokens is not router.inputs[0]
    return _Routing(tokens, scores, int(np.asarray(asked).item()), hidden, count, flattened)


def _fuse(graph: ir.Graph, nodes: Sequence[ir.Node], routing: _Routing, mlps: _Mlps) -> str | None:
    """Replace the mixture, or return why not."""
    closed = _closed(nodes, routing, mlps)
    reason = "nothing follows from the tokens and the router alone"
    tried = 0
    for output in reversed(closed):
        last = output.producer()
        experts = _experts(output, closed, mlps) if last is not None and output not in mlps else []
        if last is None or not experts:
            continue
        tried += 1
        normalize = _normalizes(output, routing, experts)
        if isinstance(normalize, bool):
            weights = [_weights(expert) for expert in experts]
            written = write_mixture(
                *(last, routing.tokens, routing.scores, weights),
                hidden=routing.hidden,
                per_token=routing.per_token,
                normalize=normalize,
            )
            replace(output, written)
            remove_unused(graph, last)
            return None
        if tried == 1:
            reason = normalize
        if tried == _MOST_TRIED:
            break
    return reason


def _closed(nodes: Sequence[ir.Node], routing: _Routing, mlps: _Mlps) -> dict[ir.Value, None]:
    """Return, in order, what depends on tokens, scores, small constants and the results of MLPs of those."""
    known: dict[ir.Value, None] = {routing.tokens: None, routing.scores: None}
    idle = 0

    def is_known(value: ir.Value | None) -> bool:
        if value is None or value in known:
            return True
        tensor = weight(value)
        return tensor is not None and tensor.size <= _MAX_CONSTANT

    for node in nodes:
        if idle > _MOST_IDLE:
            break
        mlp = mlps.get(node.outputs[0]) if node.outputs else None
        if mlp is not None:
            closes = mlp.gate.inputs[0] in known
        else:
            projects = node.op_type in ("MatMul", "Gemm") and weight(node.inputs[1]) is not None
            closes = bool(node.inputs) and not projects and all(is_known(value) for value in node.inputs)
        idle = 0 if closes else idle + 1
        if closes:
            known.update(dict.fromkeys(node.outputs))
    return known


def _experts(output: ir.Value, closed: dict[ir.Value, None], mlps: _Mlps) -> list[Expert]:
    """Return the experts that a value is made of, in the order in which they are computed."""
    seen: set[ir.Value] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if value in seen or value not in closed:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None and value not in mlps:
            stack.extend(operand for operand in producer.inputs if operand is not None)
    return [mlps[value] for value in closed if value in seen and value in mlps]


def _normalizes(output: ir.Value, routing: _Routing, experts: list[Expert]) -> bool | str:
    """Return whether the mixture normalises its weights, or why it is none."""
    if len(experts) != routing.count:
        return f"{len(experts)} experts are mixed, and the router knows {routing.count}"
    rng = np.random.default_rng(routing.count)
    tokens, scores = _probes(rng, routing)
    factors = rng.uniform(0.5, 2.0, routing.count).astype(np.float32)
    boundary, limit = [routing.tokens, routing.scores], _NODES_AN_EXPERT * (routing.count + 1)
    inner = {one: region(boundary, one, max_nodes=limit) for e in experts if (one := e.gate.inputs[0])}
    parts = [part for value, part in inner.items() if isinstance(part, Region) and value not in boundary]
    given = dict(zip((part.output for part in parts), evaluate_together(parts, tokens, scores), strict=False))
    given[routing.tokens] = tokens
    if any(one not in given for one in inner):
        return "what its experts read cannot be evaluated"
    results = [expert.down.outputs[0] for expert in experts]
    outer = region([*boundary, *results], output, max_nodes=limit)
    if isinstance(outer, str):
        return outer
    groups = [given[expert.gate.inputs[0]] for expert in experts if expert.gate.inputs[0] is not None]
    found = outer(tokens, scores, *(group * factor for group, factor in zip(groups, factors, strict=True)))
    if found.shape != tokens.shape:
        return outer.failure or "its result has another shape than its tokens"
    for normalize in (True, False):
        shares = _shares(scores, routing, normalize=normalize) @ factors
        if close(found, (tokens.reshape(-1, routing.hidden) * shares[:, None]).reshape(tokens.shape)):
            return normalize
    return "with factors in the place of experts it gives another mixture than the router's best"


def _probes(rng: np.random.Generator, routing: _Routing) -> tuple[Array, Array]:
    """Return tokens and scores; where the rank of tokens is not known they have two leading axes."""
    flat, apart = (_BATCH * _SEQUENCE,), (_BATCH, _SEQUENCE)
    lead = flat if routing.tokens.shape is not None and len(routing.tokens.shape) == 2 else apart
    tokens = rng.standard_normal((*lead, routing.hidden))
    scores = rng.standard_normal((*(flat if routing.flattened else lead), routing.count))
    return tokens.astype(np.float32), scores.astype(np.float32)


def _shares(scores: Array, routing: _Routing, *, normalize: bool) -> Array:
    """Return the weight of every expert for every token, [tokens, experts]."""
    rows = np.exp(scores.reshape(-1, routing.count).astype(np.float64))
    likely = rows / rows.sum(axis=1, keepdims=True)
    bound = np.sort(likely, axis=1)[:, [-routing.per_token]]
    shares = np.where(likely >= bound, likely, 0)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True) if normalize else shares)


def _weights(expert: Expert) -> tuple[ir.Value, ir.Value, ir.Value]:
    gate, up, down = (node.inputs[1] for node in (expert.gate, expert.up, expert.down))
    if gate is None or up is None or down is None:
        raise AssertionError("unreachable: products have two operands")
    return gate, up, down


def _beyond(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Return what operators of one type made a value of."""
    while value is not None and (node := value.producer()) is not None and node.op_type == op_type:
        value = node.inputs[0]
    return value
