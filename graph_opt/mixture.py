"""The canonical mixture of experts of docs/architecture.md, found in a graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .edit import constant, sole_consumer


@dataclass(frozen=True, slots=True)
class Expert:
    """The products of one expert: down(silu(gate(x)) * up(x))."""

    gate: ir.Node
    up: ir.Node
    down: ir.Node


@dataclass(frozen=True, slots=True)
class Mixture:
    """One sparse layer.

    Args:
        tokens: [tokens, hidden].
        scores: the router's, [tokens, experts], before the softmax.
        likely: their softmax.
        per_token: how many experts a token asks.
        normalize: the weights of a token's experts are scaled to sum to 1.
        experts: all of them, in the router's order.
        result: the product that mixes, [tokens, 1, hidden].
    """

    tokens: ir.Value
    scores: ir.Value
    likely: ir.Value
    per_token: int
    normalize: bool
    experts: tuple[Expert, ...]
    result: ir.Value


def find_mixture(split: ir.Node) -> Mixture | str | None:
    """Return the mixture whose tokens ``split`` deals out, why it is not canonical, or None if it is none."""
    copies = _made_by(split.inputs[0], "Gather")
    ranks = _made_by(copies.inputs[1], "Div") if copies is not None else None
    choice = _behind(ranks.inputs[0], "TopK", "Reshape", "TopK") if ranks is not None else None
    softmax = _behind(choice.inputs[0], "Softmax") if choice is not None else None
    if copies is None or choice is None or softmax is None:
        return None
    asked = constant(choice.inputs[1])
    tokens, scores = copies.inputs[0], _uncast(softmax.inputs[0])
    if asked is None or tokens is None or scores is None:
        return "how many experts a token asks is not fixed"
    found = [_expert(group) for group in split.outputs]
    experts = [expert for expert in found if isinstance(expert, Expert)]
    if len(experts) < len(found):
        return next(reason for reason in found if isinstance(reason, str))
    mix = _mixing_product([expert.down.outputs[0] for expert in experts])
    normalize = _is_normalized(mix.inputs[0], choice.outputs[0]) if mix is not None else None
    if mix is None or normalize is None:
        return "its experts' results are not sorted back and weighed as the canonical form does"
    likely, per_token = softmax.outputs[0], int(np.asarray(asked).item())
    return Mixture(tokens, scores, likely, per_token, normalize, tuple(experts), mix.outputs[0])


def gated_mlp(sigmoid: ir.Node) -> Expert | None:
    """Return the gated MLP without biases whose activation is SiLU by ``sigmoid``, None for anything else."""
    gate = _made_by(sigmoid.inputs[0], "MatMul")
    silu = sole_consumer(sigmoid.outputs[0])
    if gate is None or silu is None or silu.op_type != "Mul" or gate.outputs[0] not in silu.inputs:
        return None
    product = sole_consumer(silu.outputs[0])
    down = sole_consumer(product.outputs[0]) if product is not None else None
    if product is None or product.op_type != "Mul" or down is None or down.op_type != "MatMul":
        return None
    other = next((value for value in product.inputs if value is not silu.outputs[0]), None)
    up = _made_by(other, "MatMul")
    is_gated = up is not None and up.inputs[0] is gate.inputs[0] and down.inputs[0] is product.outputs[0]
    return Expert(gate, up, down) if up is not None and is_gated else None


def _expert(group: ir.Value) -> Expert | str:
    """Return the expert that computes ``group``."""
    readers = [use.node for use in group.uses()]
    if len(readers) != 2 or any(node.op_type != "MatMul" for node in readers):
        return "an expert is no gated MLP without biases"
    uses = [use.node for reader in readers for use in reader.outputs[0].uses()]
    found = [gated_mlp(node) for node in uses if node.op_type == "Sigmoid"]
    return (found[0] if found else None) or "an expert's activation is not SiLU"


def _mixing_product(results: list[ir.Value]) -> ir.Node | None:
    """Return the product behind the sorted results of all experts, in their order."""
    joined = sole_consumer(results[0])
    if joined is None or joined.op_type != "Concat" or list(joined.inputs) != results:
        return None
    node: ir.Node | None = joined
    for op_type in ("Gather", "Reshape", "MatMul"):
        node = sole_consumer(node.outputs[0]) if node is not None else None
        if node is None or node.op_type != op_type or node.domain:
            return None
    return node


def _is_normalized(weights: ir.Value | None, chosen: ir.Value) -> bool | None:
    """Return whether weights are those chosen divided by their sum, None if they are something else."""
    spread = _behind(weights, "Unsqueeze")
    plain = _uncast(spread.inputs[0]) if spread is not None else None
    if plain is chosen:
        return False
    share = _made_by(plain, "Div")
    total = _behind(share.inputs[1], "ReduceSum") if share is not None else None
    is_share = share is not None and total is not None and share.inputs[0] is total.inputs[0] is chosen
    return True if is_share else None


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _behind(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Follow first inputs upstream through operators of these types, casts aside, to the last."""
    node: ir.Node | None = None
    for op_type in op_types:
        node = _made_by(_uncast(value), op_type)
        if node is None:
            return None
        value = node.inputs[0]
    return node


def _uncast(value: ir.Value | None) -> ir.Value | None:
    while (cast := _made_by(value, "Cast")) is not None:
        value = cast.inputs[0]
    return value
