"""Find the canonical mixture of experts of docs/contract.md in a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.edit import constant, sole_consumer, weight


@dataclass(frozen=True, slots=True)
class Linear:
    """A MatMul with a weight, with an optional bias."""

    product: ir.Node
    bias: ir.Value | None
    output: ir.Value

    @property
    def x(self) -> ir.Value:
        """The input, [..., in]."""
        return _operand(self.product, 0)

    @property
    def weight(self) -> ir.Value:
        """The weight [in, out]; may be the output of a DequantizeLinear."""
        return _operand(self.product, 1)


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between an expert's products: act(g) * (u + beta), or act(g) without an up projection.

    Here g is the gate projection clipped to at most ``limit``, and u the up projection clipped to
    [-limit, limit].

    Args:
        name: "silu", which is g * sigmoid(alpha * g); "gelu", with tanh; "relu"; or "identity".
        alpha: factor inside of "silu".
        beta: added to u.
        limit: infinite for no clipping.
    """

    name: str = "silu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Expert:
    """The layers of one expert: down(act(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation

    @property
    def layers(self) -> tuple[Linear, Linear, Linear]:
        """Gate, up and down."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Mixture:
    """A sparse mixture-of-experts layer.

    Args:
        tokens: [tokens, hidden].
        scores: the router's logits [tokens, experts].
        probabilities: the softmax of ``scores``.
        per_token: number of experts per token (top-k).
        normalize: whether the routing weights of a token are scaled to sum to 1.
        experts: all experts, in the router's order.
        result: the weighted sum of the experts' results, [tokens, 1, hidden].
    """

    tokens: ir.Value
    scores: ir.Value
    probabilities: ir.Value
    per_token: int
    normalize: bool
    experts: tuple[Expert, ...]
    result: ir.Value


def find_mixture(split: ir.Node) -> Mixture | str | None:
    """Return the mixture whose tokens ``split`` distributes to experts.

    Returns:
        The mixture; the reason if it is a mixture but not canonical; None if it is not a mixture.
    """
    copies = _made_by(split.inputs[0], "Gather")
    ranks = _made_by(copies.inputs[1], "Div") if copies is not None else None
    choice = _behind(ranks.inputs[0], "TopK", "Reshape", "TopK") if ranks is not None else None
    softmax = _behind(choice.inputs[0], "Softmax") if choice is not None else None
    if copies is None or choice is None:
        return None
    if softmax is None:
        return "its experts are not selected by a softmax"
    asked = constant(choice.inputs[1])
    tokens, scores = copies.inputs[0], _uncast(softmax.inputs[0])
    if asked is None or tokens is None or scores is None:
        return "the number of experts per token is not constant"
    found = [_expert(group) for group in split.outputs]
    experts = [expert for expert in found if isinstance(expert, Expert)]
    if len(experts) < len(found):
        return next(reason for reason in found if isinstance(reason, str))
    mix = _mixing_product([expert.down.output for expert in experts])
    normalize = _is_normalized(mix.inputs[0], choice.outputs[0]) if mix is not None else None
    if mix is None or normalize is None:
        return "its experts' results are not sorted back and weighted as in the canonical form"
    probabilities, per_token = softmax.outputs[0], int(np.asarray(asked).item())
    return Mixture(tokens, scores, probabilities, per_token, normalize, tuple(experts), mix.outputs[0])


def gated_mlp(sigmoid: ir.Node) -> Expert | None:
    """Return the gated MLP whose SiLU contains ``sigmoid``, None if there is none."""
    gated, alpha = _with_constant(sigmoid.inputs[0], "Mul", 1.0)
    silu = sole_consumer(sigmoid.outputs[0])
    if gated is None or silu is None or silu.op_type != "Mul" or gated not in silu.inputs:
        return None
    product = sole_consumer(silu.outputs[0])
    if product is None or product.op_type != "Mul":
        return None
    other = next((value for value in product.inputs if value is not silu.outputs[0]), None)
    shifted, beta = _with_constant(other, "Add", 0.0)
    (gate_output, gate_limits), (up_output, up_limits) = _clipped(gated), _clipped(shifted)
    gate, up, limit = _linear_before(gate_output), _linear_before(up_output), gate_limits[1]
    if (gate_limits, up_limits) != ((-math.inf, limit), (-limit, limit)):
        return None
    consumer = sole_consumer(product.outputs[0])
    down = _linear(consumer) if consumer is not None and consumer.op_type == "MatMul" else None
    if gate is None or up is None or down is None:
        return None
    if gate.x is not up.x or down.x is not product.outputs[0]:
        return None
    return Expert(gate, up, down, Activation("silu", alpha, beta, limit))


def _with_constant(value: ir.Value | None, op_type: str, neutral: float) -> tuple[ir.Value | None, float]:
    """Return x and c if ``value`` is op_type(x, c) with a constant c, else ``value`` and ``neutral``."""
    node = _made_by(value, op_type)
    for operand in node.inputs if node is not None else ():
        number = _number(operand)
        if node is not None and number is not None:
            return next(other for other in node.inputs if other is not operand), number
    return value, neutral


def _clipped(value: ir.Value | None) -> tuple[ir.Value | None, tuple[float, float]]:
    """Return x and the limits if ``value`` is Clip(x), else ``value`` and infinite limits."""
    node = _made_by(value, "Clip")
    if node is None:
        return value, (-math.inf, math.inf)
    given = [*node.inputs[1:], None, None]
    low = -math.inf if given[0] is None else _number(given[0])
    high = math.inf if given[1] is None else _number(given[1])
    return (value, (-math.inf, math.inf)) if low is None or high is None else (node.inputs[0], (low, high))


def _number(value: ir.Value | None) -> float | None:
    tensor = weight(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _linear_before(value: ir.Value | None) -> Linear | None:
    """Return the linear layer whose result is ``value``, else None."""
    product = _made_by(value, "MatMul")
    if product is None and (added := _made_by(value, "Add")) is not None:
        product = next((one for given in added.inputs if (one := _made_by(given, "MatMul"))), None)
    layer = _linear(product) if product is not None else None
    return layer if layer is not None and layer.output is value else None


def _linear(product: ir.Node) -> Linear:
    """Return the linear layer of a product; it has a bias if its only consumer adds a 1-D weight."""
    output = product.outputs[0]
    added = sole_consumer(output)
    if added is not None and added.op_type == "Add" and not added.domain:
        bias = next((value for value in added.inputs if value is not output), None)
        tensor = weight(bias)
        if tensor is not None and len(tensor.shape) == 1 and tensor.size > 1:
            return Linear(product, bias, added.outputs[0])
    return Linear(product, None, output)


def _expert(group: ir.Value) -> Expert | str:
    """Return the expert that reads ``group``, or why it is not a gated MLP."""
    readers = [use.node for use in group.uses()]
    if len(readers) != 2 or any(node.op_type != "MatMul" for node in readers):
        return "an expert is not a gated MLP"
    for reader in readers:
        for sigmoid in _sigmoids_after(_linear(reader).output):
            found = gated_mlp(sigmoid)
            if found is not None:
                return found
    return "an expert's activation is not SiLU"


def _sigmoids_after(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the Sigmoid nodes that read ``value``, possibly clipped and scaled."""
    for node in (use.node for use in value.uses()):
        if node.op_type == "Sigmoid":
            yield node
        elif node.op_type in ("Clip", "Mul"):
            yield from _sigmoids_after(node.outputs[0])


def _mixing_product(results: list[ir.Value]) -> ir.Node | None:
    """Return the MatMul that weights the experts' results, if they are concatenated in order, else None."""
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
    """Return True if ``weights`` is ``chosen`` divided by its sum, False if it is ``chosen``, else None."""
    spread = _behind(weights, "Unsqueeze")
    plain = _uncast(spread.inputs[0]) if spread is not None else None
    if plain is chosen:
        return False
    share = _made_by(plain, "Div")
    total = _behind(share.inputs[1], "ReduceSum") if share is not None else None
    is_share = share is not None and total is not None and share.inputs[0] is total.inputs[0] is chosen
    return True if is_share else None


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise AssertionError(f"unreachable: a {node.op_type} has two operands")
    return value


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _behind(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Follow first inputs upstream through nodes of these types, ignoring casts, and return the last."""
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
