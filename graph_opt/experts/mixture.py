"""Find the canonical mixture of experts of docs/contract.md in a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import constant, sole_consumer, text_attribute, weight


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
        name: "silu", which is g * sigmoid(alpha * g); "gelu", with tanh; "relu"; "relu2", its square; or
            "identity".
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
    """The layers of one expert: down(act(gate(x)) * up(x)), or down(act(gate(x))) if ``up`` is None.

    Args:
        gate: the layer before the activation.
        up: the layer by whose result it is multiplied.
        down: the last layer.
        activation: the function between.
        join: the ``AllGather`` of what down reads, in a graph of one of several ranks.
    """

    gate: Linear
    up: Linear | None
    down: Linear
    activation: Activation
    join: ir.Node | None = None

    @property
    def entering(self) -> tuple[Linear, ...]:
        """The layers that read the tokens: gate, and up if there is one."""
        return (self.gate,) if self.up is None else (self.gate, self.up)

    @property
    def layers(self) -> tuple[Linear, ...]:
        """Gate, up if there is one, and down."""
        return *self.entering, self.down


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """A choice of the experts of the largest scores, weighted by their softmax.

    Args:
        scores: the router's logits [tokens, experts].
        probabilities: the softmax of ``scores``.
        normalize: whether the routing weights of a token are scaled to sum to 1.
    """

    scores: ir.Value
    probabilities: ir.Value
    normalize: bool


@dataclass(frozen=True, slots=True)
class Mixture:
    """A sparse mixture-of-experts layer.

    Args:
        tokens: [tokens, hidden].
        chosen: the experts of each token, int64 [tokens, per_token].
        weights: their routing weights [tokens, per_token].
        per_token: number of experts per token (top-k).
        router: how ``chosen`` and ``weights`` are computed, if by a softmax; None for any other nodes.
        experts: all experts, in the router's order.
        result: the weighted sum of the experts' results, [tokens, 1, hidden].
    """

    tokens: ir.Value
    chosen: ir.Value
    weights: ir.Value
    per_token: int
    router: SoftmaxRouter | None
    experts: tuple[Expert, ...]
    result: ir.Value


def find_mixture(split: ir.Node) -> Mixture | str | None:
    """Return the mixture whose tokens ``split`` distributes to experts.

    Returns:
        The mixture; the reason if it is a mixture but not canonical; None if it is not a mixture.
    """
    copies = _made_by(split.inputs[0], "Gather")
    ranks = _made_by(copies.inputs[1], "Div") if copies is not None else None
    flat = _behind(ranks.inputs[0], "TopK", "Reshape") if ranks is not None else None
    if copies is None or ranks is None or flat is None:
        return None
    asked, tokens, chosen = constant(ranks.inputs[1]), copies.inputs[0], flat.inputs[0]
    if asked is None or tokens is None or chosen is None:
        return "the number of experts per token is not constant"
    found = [_expert(group) for group in split.outputs]
    experts = [expert for expert in found if isinstance(expert, Expert)]
    if len(experts) < len(found):
        return next(reason for reason in found if isinstance(reason, str))
    mix = _mixing_product([expert.down.output for expert in experts])
    spread = _behind(mix.inputs[0], "Unsqueeze") if mix is not None else None
    weights = spread.inputs[0] if spread is not None else None
    if mix is None or weights is None:
        return "its experts' results are not sorted back and weighted as in the canonical form"
    per_token, router = int(np.asarray(asked).item()), _softmax_router(chosen, weights)
    return Mixture(tokens, chosen, weights, per_token, router, tuple(experts), mix.outputs[0])


def _softmax_router(chosen: ir.Value, weights: ir.Value) -> SoftmaxRouter | None:
    """Return the router whose softmax makes the choice and its weights, None if other nodes do."""
    choice = _made_by(_uncast(chosen), "TopK")
    softmax = _behind(choice.inputs[0], "Softmax") if choice is not None else None
    scores = _uncast(softmax.inputs[0]) if softmax is not None else None
    if choice is None or softmax is None or scores is None:
        return None
    normalize = _is_normalized(weights, choice.outputs[0])
    return None if normalize is None else SoftmaxRouter(scores, softmax.outputs[0], normalize)


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
    if up is None or (gate_limits, up_limits) != ((-math.inf, limit), (-limit, limit)):
        return None
    return _of_layers(gate, up, product, Activation("silu", alpha, beta, limit))


def _gelu_mlp(gelu: ir.Node) -> Expert | None:
    """Return the gated MLP with this activation function, None if there is none."""
    product = sole_consumer(gelu.outputs[0])
    if text_attribute(gelu, "approximate", "none") != "tanh" or product is None or product.op_type != "Mul":
        return None
    other = next((value for value in product.inputs if value is not gelu.outputs[0]), None)
    up = _linear_before(other)
    return None if up is None else _of_layers(_linear_before(gelu.inputs[0]), up, product, Activation("gelu"))


def _relu2_mlp(relu: ir.Node) -> Expert | None:
    """Return the MLP without a gate whose activation is the square of ``relu``, None if there is none."""
    positive = relu.outputs[0]
    square = next(iter({use.node for use in positive.uses()}), None)
    if square is None or square.op_type != "Mul" or list(square.inputs) != [positive, positive]:
        return None
    return _of_layers(_linear_before(relu.inputs[0]), None, square, Activation("relu2"))


def _of_layers(
    gate: Linear | None, up: Linear | None, product: ir.Node, activation: Activation
) -> Expert | None:
    """Return the expert whose down projection reads ``product``, None if it is none."""
    consumer, between = sole_consumer(product.outputs[0]), product.outputs[0]
    join = consumer if consumer is not None and consumer.op_type == "AllGather" else None
    if join is not None:
        consumer, between = sole_consumer(join.outputs[0]), join.outputs[0]
    down = _linear(consumer) if consumer is not None and consumer.op_type == "MatMul" else None
    if gate is None or down is None or down.x is not between:
        return None
    return None if up is not None and gate.x is not up.x else Expert(gate, up, down, activation, join)


_MLPS = {"Sigmoid": gated_mlp, "Gelu": _gelu_mlp, "Relu": _relu2_mlp}


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
    """Return the expert that reads ``group``, or why it is not an MLP."""
    readers = [use.node for use in group.uses()]
    if len(readers) > 2 or any(node.op_type != "MatMul" for node in readers):
        return "an expert is not an MLP of two or three products"
    for reader in readers:
        for node in _activations_after(_linear(reader).output):
            found = _MLPS[node.op_type](node)
            if found is not None and len(found.entering) == len(readers):
                return found
    return "an expert's activation is not SiLU, GELU (tanh) or a squared ReLU"


def _activations_after(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes of activation functions that read ``value``, possibly clipped and scaled."""
    for node in (use.node for use in value.uses()):
        if node.op_type in _MLPS:
            yield node
        elif node.op_type in ("Clip", "Mul"):
            yield from _activations_after(node.outputs[0])


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


def _is_normalized(weights: ir.Value, chosen: ir.Value) -> bool | None:
    """Return True if ``weights`` is ``chosen`` divided by its sum, False if it is ``chosen``, else None."""
    plain = _uncast(weights)
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
