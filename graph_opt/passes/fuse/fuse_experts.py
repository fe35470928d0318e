"""Fuse a traced mixture of experts into its canonical form.

Traces compute every expert on every token with routing weights that may be 0, or gather each expert's tokens
and scatter-add its results. A candidate is proven without the experts' weights: each expert is replaced by a
multiplication with a factor, and the remaining nodes must then compute the mixture of these factors on
random tokens and scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...analysis.region import Array, Region, close, evaluate_together, region
from ...experts.expert_parts import ExpertPart, expert_parts
from ...experts.mixture import Mixture, find_mixture
from ...experts.write_mixture import Routing, write_mixture
from ...graph.edit import constant, int_attribute, nodes_of, remove_unused, replace, weight
from ...graph.lazy import shape_of
from ..base import GraphPass

_BATCH, _SEQUENCE = 2, 5
_NODES_PER_EXPERT = 64
_MAX_CONSTANT = 1 << 16
_MAX_IDLE = 256  # the search ends after this many consecutive nodes outside of the mixture
_MAX_TRIED = 8  # candidate results of the mixture that are tried, last first
_Parts = Mapping[ir.Value, ExpertPart]  # by their result


@dataclass(frozen=True, slots=True)
class _Routing:
    """A router, which computes scores [..., experts] of tokens [..., hidden] for a TopK.

    Args:
        tokens: the router's input before any Reshape.
        rows: the router's input, may be flattened.
        scores: the router's logits.
        per_token: number of experts per token.
        hidden: size of a token.
        count: number of experts.
    """

    tokens: ir.Value
    rows: ir.Value
    scores: ir.Value
    per_token: int
    hidden: int
    count: int

    @property
    def flattened(self) -> bool:
        """Whether the scores have one leading axis for batch and sequence."""
        return self.tokens is not self.rows


@dataclass(frozen=True, slots=True)
class _Proof:
    """The result of a successful proof.

    Args:
        x: the tokens, in the shape of the mixture's result.
        normalize: whether the routing weights of a token are scaled to sum to 1.
    """

    x: ir.Value
    normalize: bool


class FuseExpertsPass(GraphPass):
    """Replace every mixture of experts that is not in canonical form."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every TopK of the scores of a MatMul or Gemm, or of their softmax."""
        mixtures = [find_mixture(node) for node in nodes_of(graph, "Split")]
        done = {one.chosen for one in mixtures if isinstance(one, Mixture)}
        parts = expert_parts(graph)
        nodes = list(graph)
        places = {node: place for place, node in enumerate(nodes)}
        for node in nodes_of(graph, "TopK"):
            routing = _routing(node) if parts and node.outputs[1] not in done else None
            if routing is None:
                continue
            first = routing.tokens.producer()
            reason = _fuse(graph, nodes[places[first] if first is not None else 0 :], routing, parts)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)


def _routing(choice: ir.Node) -> _Routing | None:
    """Return the router whose scores, or their softmax, ``choice`` ranks."""
    scores = _skip(choice.inputs[0], "Cast")
    softmax = scores.producer() if scores is not None else None
    if softmax is not None and softmax.op_type == "Softmax":
        scores = _skip(softmax.inputs[0], "Cast")
    router = _router(scores)
    if scores is None or router is None:
        return None
    tokens, asked, matrix = (
        _skip(router.inputs[0], "Reshape"),
        constant(choice.inputs[1]),
        weight(router.inputs[1]),
    )
    rows = router.inputs[0]
    if tokens is None or rows is None or asked is None or matrix is None or len(matrix.shape) != 2:
        return None
    hidden, count = shape_of(matrix)[:: -1 if int_attribute(router, "transB", 0) else 1]
    return _Routing(tokens, rows, scores, int(np.asarray(asked).item()), hidden, count)


def _router(scores: ir.Value | None) -> ir.Node | None:
    """Return the product that computes ``scores``, behind an optional bias."""
    node = scores.producer() if scores is not None else None
    if node is not None and node.op_type == "Add":
        made = [value.producer() for value in node.inputs if value is not None and weight(value) is None]
        node = made[0] if len(made) == 1 else None
    return node if node is not None and node.op_type in ("MatMul", "Gemm") else None


def _fuse(graph: ir.Graph, nodes: Sequence[ir.Node], routing: _Routing, parts: _Parts) -> str | None:
    """Replace the mixture; return the reason if that is not possible."""
    known = _known_values(nodes, routing, parts)
    reason = "no value depends only on the tokens and the router"
    tried = 0
    for output in reversed(known):
        last = output.producer()
        mixed = _experts_of(output, known, parts) if last is not None and output not in parts else []
        if last is None or not mixed:
            continue
        tried += 1
        proof = _prove(output, routing, mixed)
        if isinstance(proof, _Proof):
            experts = [one for part in mixed for one in part.weights(graph, last)]
            written = write_mixture(
                *(last, proof.x, Routing(routing.scores, routing.per_token, proof.normalize), experts),
                hidden=routing.hidden,
                activation=mixed[0].activation,
            )
            replace(output, written)
            remove_unused(graph, last)
            return None
        if tried == 1:
            reason = proof
        if tried == _MAX_TRIED:
            break
    return reason


def _known_values(nodes: Sequence[ir.Node], routing: _Routing, parts: _Parts) -> dict[ir.Value, None]:
    """Return in order the values that depend only on tokens, scores, small constants and experts."""
    known: dict[ir.Value, None] = {routing.tokens: None, routing.scores: None}
    idle = 0

    def is_known(value: ir.Value | None) -> bool:
        if value is None or value in known:
            return True
        tensor = weight(value)
        return tensor is not None and tensor.size <= _MAX_CONSTANT

    for node in nodes:
        if idle > _MAX_IDLE:
            break
        part = parts.get(node.outputs[0]) if node.outputs else None
        if part is not None:
            computable = all(value in known for value in part.reads)
        else:
            projects = node.op_type in ("MatMul", "Gemm") and weight(node.inputs[1]) is not None
            computable = bool(node.inputs) and not projects and all(map(is_known, node.inputs))
        idle = 0 if computable else idle + 1
        if computable:
            known.update(dict.fromkeys(node.outputs))
    return known


def _experts_of(output: ir.Value, known: dict[ir.Value, None], parts: _Parts) -> list[ExpertPart]:
    """Return the experts upstream of ``output``, in the order of their computation."""
    seen: set[ir.Value] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if value in seen or value not in known:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None and value not in parts:
            stack.extend(operand for operand in producer.inputs if operand is not None)
    return [parts[value] for value in known if value in seen and value in parts]


def _prove(output: ir.Value, routing: _Routing, parts: list[ExpertPart]) -> _Proof | str:
    """Prove that ``output`` is the mixture of experts, or return why it is not."""
    count = sum(part.count for part in parts)
    if count != routing.count:
        return f"it combines {count} experts, but its router scores {routing.count}"
    rng = np.random.default_rng(routing.count)
    tokens, scores = _probes(rng, routing)
    factors = rng.uniform(0.5, 2.0, routing.count).astype(np.float32)
    boundary = {routing.tokens: tokens, routing.scores: scores}
    inner = _inner_values(parts, boundary, limit := _NODES_PER_EXPERT * (routing.count + 1))
    if any(value not in inner for part in parts for value in part.reads):
        return "the inputs of its experts cannot be evaluated"
    refusals = (part.refusal(boundary, inner) for part in parts)
    if (refusal := next((one for one in refusals if one is not None), None)) is not None:
        return refusal
    if any(part.activation != parts[0].activation for part in parts):
        return "its experts have different activations"
    outer = region([*boundary, *(part.result for part in parts)], output, max_nodes=limit)
    if isinstance(outer, str):
        return outer
    results = outer(tokens, scores, *_substitutes(parts, inner, factors))
    flat = tokens.reshape(-1, routing.hidden)
    if results.shape not in (tokens.shape, flat.shape):
        return outer.failure or "the shape of its result differs from that of its tokens"
    x = routing.tokens if results.shape == tokens.shape else routing.rows
    for normalize in (True, False):
        shares = _shares(scores, routing, normalize=normalize) @ factors
        if close(results.reshape(flat.shape), flat * shares[:, None]):
            return _Proof(x, normalize)
    return "with experts replaced by factors, it does not compute the mixture of the router's top experts"


def _inner_values(
    parts: Sequence[ExpertPart], boundary: Mapping[ir.Value, Array], limit: int
) -> dict[ir.Value, Array]:
    """Evaluate the inputs of experts that depend only on tokens and scores."""
    reads = dict.fromkeys(value for part in parts for value in part.reads if value not in boundary)
    cut = [region(list(boundary), one, max_nodes=limit) for one in reads]
    inner = [part for part in cut if isinstance(part, Region)]
    values = evaluate_together(inner, *boundary.values())
    return {**dict(zip((part.output for part in inner), values, strict=False)), **boundary}


def _substitutes(
    parts: Sequence[ExpertPart], inputs: Mapping[ir.Value, Array], factors: Array
) -> list[Array]:
    """Return the results of experts that only multiply their tokens by their factor."""
    ends = np.cumsum([part.count for part in parts])
    return [
        part.substitute(inputs, factors[end - part.count : end])
        for part, end in zip(parts, ends, strict=True)
    ]


def _probes(rng: np.random.Generator, routing: _Routing) -> tuple[Array, Array]:
    """Return random tokens and scores, with two leading axes if the rank of the tokens is unknown."""
    flat, apart = (_BATCH * _SEQUENCE,), (_BATCH, _SEQUENCE)
    lead = flat if routing.tokens.shape is not None and len(routing.tokens.shape) == 2 else apart
    tokens = rng.standard_normal((*lead, routing.hidden))
    scores = rng.standard_normal((*(flat if routing.flattened else lead), routing.count))
    return tokens.astype(np.float32), scores.astype(np.float32)


def _shares(scores: Array, routing: _Routing, *, normalize: bool) -> Array:
    """Return the routing weight of every expert for every token, [tokens, experts]."""
    rows = np.exp(scores.reshape(-1, routing.count).astype(np.float64))
    probabilities = rows / rows.sum(axis=1, keepdims=True)
    bound = np.sort(probabilities, axis=1)[:, [-routing.per_token]]
    shares = np.where(probabilities >= bound, probabilities, 0)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True) if normalize else shares)


def _skip(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Follow ``value`` upstream through nodes of one operator."""
    while value is not None and (node := value.producer()) is not None and node.op_type == op_type:
        value = node.inputs[0]
    return value
