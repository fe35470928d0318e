"""Find the token axis of every value, and prove that only Attention mixes tokens.

If that holds and every Attention is causal, a token's logits depend only on the tokens up to it. So a graph
computes the same for a whole sequence as in pieces with a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ...contract import INPUT_IDS, LOGITS, POSITION_IDS
from ...records import dataclass
from ..graph.edit import constant, int_attribute
from .probe_sizes import ProbeSizes
from .shape_facts import ShapeFacts

_MASK = 3  # operands of Attention before it are query, key and value


@dataclass(frozen=True, slots=True)
class Axis:
    """The token axis; ``flat`` if it holds the tokens of all rows of the batch, row by row."""

    index: int
    flat: bool = False


class Mixed(Exception):  # noqa: N818 -- the reason of a refusal, not an error of the caller
    """A node mixes tokens, or is not known to process each token separately."""

    def __init__(self, node: ir.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class TokenAxes:
    """The token axes of a decoder, from its inputs to its logits.

    Args:
        graph: a decoder with canonical operators where possible.
        layers: results of layers of several nodes that process each token separately, with what they read,
            tokens first.

    Attributes:
        sizes: the sets of sizes for which shapes are known.
        axes: the token axis of each value upstream of the logits that has one.

    Raises:
        Mixed: a node upstream of the logits mixes tokens.
    """

    def __init__(self, graph: ir.Graph, layers: Mapping[ir.Value, Sequence[ir.Value]] | None = None) -> None:
        layers = layers or {}
        self._facts = ShapeFacts(graph)
        self.sizes = self._facts.probes
        self.axes = {value: Axis(1) for value in graph.inputs if value.name in (INPUT_IDS, POSITION_IDS)}
        self._varying = {value for value in graph.inputs if value not in self.axes}
        logits = next(value for value in graph.outputs if value.name == LOGITS)
        needed = _upstream(logits, layers)
        for node in graph:
            if node in needed:
                self._follow(node, layers.get(node.outputs[0], ()))
        if self.axes.get(logits) != Axis(1):
            raise Mixed(next(iter(needed)), "the logits do not have one row per token")

    def rank(self, value: ir.Value) -> int:
        """Return the number of axes of a value."""
        return len(self.shapes(value)[0])

    def shapes(self, value: ir.Value) -> Sequence[Sequence[int]]:
        """Return the shape of a value for each set of sizes."""
        found = self._facts.shapes(value)
        if found is None:
            raise Mixed(value.producer() or ir.node("Input", []), f"the shape of {value.name} is unknown")
        return found

    def operand(self, node: ir.Node, index: int) -> ir.Value:
        """Return a required operand."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise Mixed(node, f"{node.op_type} has no operand {index}")
        return value

    def require(self, node: ir.Node, condition: bool) -> None:
        """Raise ``Mixed`` unless ``condition`` holds."""
        if not condition:
            raise Mixed(node, f"{node.op_type} mixes tokens, or is not known to process each separately")

    def _follow(self, node: ir.Node, reads: Sequence[ir.Value]) -> None:
        if reads:
            self.require(node, len({self.axes.get(value) for value in reads}) == 1)
            self.axes[node.outputs[0]] = _rearranged(self, node, reads[0])
            return
        operands = [value for value in _operands(node) if value is not None]
        if node.op_type == "Expand":  # an expanded constant is constant
            operands = operands[:1]
        varying = any(value in self._varying for value in operands)
        if node.op_type == "Shape" or not any(value in self.axes for value in operands):
            if varying or node.op_type == "Shape":
                self._varying.update(node.outputs)
            return
        rule = None if node.domain else _RULES.get(node.op_type)
        if rule is None:
            raise Mixed(node, f"{node.op_type} is not known to process each token separately")
        self.require(node, not varying or node.op_type in _READ_SHAPES)
        axis = rule(self, node)
        for output in node.outputs[:1] if node.op_type == "Attention" else node.outputs:
            self.axes[output] = axis


def _operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the operands of a node, without the mask and the cache of an Attention."""
    return node.inputs[:_MASK] if node.op_type == "Attention" and not node.domain else node.inputs


def _upstream(value: ir.Value, layers: Mapping[ir.Value, Sequence[ir.Value]]) -> dict[ir.Node, None]:
    nodes: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        node = current.producer()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += layers.get(current) or [x for x in _operands(node) if x is not None]
    return nodes


def _broadcast(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Require one token axis, counted from the last, along which operands without tokens are broadcast."""
    operands = [value for value in node.inputs if value is not None]
    ends = {tokens.rank(x) - tokens.axes[x].index for x in operands if x in tokens.axes}
    kinds = {tokens.axes[x].flat for x in operands if x in tokens.axes}
    tokens.require(node, len(ends) == len(kinds) == 1)
    end = ends.pop()
    for other in operands:
        if other not in tokens.axes and tokens.rank(other) >= end:
            tokens.require(node, all(shape[-end] == 1 for shape in tokens.shapes(other)))
    return Axis(max(map(tokens.rank, operands)) - end, kinds.pop())


def _first(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Return the token axis of the first operand, which must be the only one with tokens."""
    first = tokens.operand(node, 0)
    tokens.require(
        node, first in tokens.axes and not any(value in tokens.axes for value in node.inputs[1:] if value)
    )
    return tokens.axes[first]


def _norm(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Require that the normalised axes, from ``axis`` on, come after the token axis."""
    axis, rank = _first(tokens, node), tokens.rank(tokens.operand(node, 0))
    tokens.require(node, int_attribute(node, "axis", -1) % rank > axis.index)
    for scale in node.inputs[1:]:
        tokens.require(node, scale is None or tokens.rank(scale) < rank - axis.index)
    return axis


def _along_axis(tokens: TokenAxes, node: ir.Node) -> Axis:
    axis, rank = _first(tokens, node), tokens.rank(tokens.operand(node, 0))
    tokens.require(
        node, int_attribute(node, "axis", 0 if node.op_type == "Split" else -1) % rank != axis.index
    )
    return axis


def _concat(tokens: TokenAxes, node: ir.Node) -> Axis:
    operands = [tokens.operand(node, index) for index in range(len(node.inputs))]
    found = tokens.axes.get(operands[0])
    tokens.require(node, found is not None and all(tokens.axes.get(value) == found for value in operands))
    axis = tokens.axes[operands[0]]
    tokens.require(node, int_attribute(node, "axis", 0) % tokens.rank(operands[0]) != axis.index)
    return axis


def _slice(tokens: TokenAxes, node: ir.Node) -> Axis:
    found, rank = _first(tokens, node), tokens.rank(tokens.operand(node, 0))
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else range(rank)
    tokens.require(node, axes is not None and found.index not in {int(axis) % rank for axis in axes})
    return found


def _reduce(tokens: TokenAxes, node: ir.Node) -> Axis:
    reduced, rank = _first(tokens, node), tokens.rank(tokens.operand(node, 0))
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = [] if given is None else [int(axis) % rank for axis in given]
    tokens.require(node, bool(axes) and reduced.index not in axes)
    gone = 0 if int_attribute(node, "keepdims", 1) else sum(axis < reduced.index for axis in axes)
    return Axis(reduced.index - gone, reduced.flat)


def _product(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Accept each token's features times one matrix, or one matrix times each token as a column."""
    x, matrix = tokens.operand(node, 0), tokens.operand(node, 1)
    if x not in tokens.axes:
        tokens.require(node, node.op_type == "MatMul" and tokens.rank(x) <= tokens.rank(matrix))
        tokens.require(node, tokens.axes[matrix] == Axis(tokens.rank(matrix) - 1))
        return tokens.axes[matrix]
    axis = _first(tokens, node)
    tokens.require(node, tokens.rank(matrix) == 2 and axis.index < tokens.rank(x) - 1)
    tokens.require(node, not int_attribute(node, "transA", 0))
    if len(node.inputs) > 2:
        bias = tokens.operand(node, 2)
        tokens.require(node, tokens.rank(bias) < 2 or all(shape[0] == 1 for shape in tokens.shapes(bias)))
    return axis


def _gather(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Accept rows of a table gathered by token, or features gathered from each token."""
    data, index = tokens.operand(node, 0), tokens.operand(node, 1)
    axis = int_attribute(node, "axis", 0) % tokens.rank(data)
    if data not in tokens.axes:
        return Axis(axis + tokens.axes[index].index, tokens.axes[index].flat)
    found = _first(tokens, node)
    tokens.require(node, axis != found.index)
    return found if found.index < axis else Axis(found.index - 1 + tokens.rank(index), found.flat)


def _transpose(tokens: TokenAxes, node: ir.Node) -> Axis:
    axis, rank = _first(tokens, node), tokens.rank(tokens.operand(node, 0))
    perm = node.attributes.get("perm")
    order = list(range(rank))[::-1] if perm is None else list(perm.as_ints())
    tokens.require(node, not axis.flat or order[0] == 0)
    return Axis(order.index(axis.index), axis.flat)


def _reshape(tokens: TokenAxes, node: ir.Node) -> Axis:
    """Require that the tokens stay in order on one axis, possibly merged with the batch."""
    return _rearranged(tokens, node, tokens.operand(node, 0))


def _rearranged(tokens: TokenAxes, node: ir.Node, x: ir.Value) -> Axis:
    tokens.require(node, x in tokens.axes)
    before, after = tokens.shapes(x), tokens.shapes(node.outputs[0])
    for new in [*(Axis(index) for index in range(len(after[0]))), Axis(0, flat=True)]:
        if all(
            _keeps(tokens.axes[x], new, *given) for given in zip(before, after, tokens.sizes, strict=True)
        ):
            return new
    raise Mixed(node, "Reshape splits or joins tokens")


def _keeps(old: Axis, new: Axis, before: Sequence[int], after: Sequence[int], sizes: ProbeSizes) -> bool:
    """Return whether a reshape keeps the tokens in order and separate."""
    lead = math.prod(before[: old.index])
    if new.flat:
        return (old.flat or lead == sizes.batch) and after[:1] == (sizes.batch * sizes.sequence,)
    if old.flat:
        return new.index == 1 and tuple(after[:2]) == (sizes.batch, sizes.sequence)
    return math.prod(after[: new.index]) == lead and after[new.index] == before[old.index]


def _expand(tokens: TokenAxes, node: ir.Node) -> Axis:
    found, x, output = tokens.axes.get(tokens.operand(node, 0)), tokens.operand(node, 0), node.outputs[0]
    index = (found.index if found is not None else 0) + tokens.rank(output) - tokens.rank(x)
    pairs = zip(tokens.shapes(x), tokens.shapes(output), strict=True)
    tokens.require(node, found is not None and not found.flat)
    tokens.require(node, all(before[index - len(after)] == after[index] for before, after in pairs))
    return Axis(index)


def _rotary(tokens: TokenAxes, node: ir.Node) -> Axis:
    x, *angles = [tokens.operand(node, index) for index in range(3)]
    tokens.require(node, len(node.inputs) == 3 and all(tokens.axes.get(angle) == Axis(1) for angle in angles))
    tokens.require(node, tokens.axes.get(x) == Axis(tokens.rank(x) - 2))
    return tokens.axes[x]


def _attention(tokens: TokenAxes, node: ir.Node) -> Axis:
    operands = [tokens.operand(node, index) for index in range(_MASK)]
    tokens.require(node, all(tokens.axes.get(x) == Axis(tokens.rank(x) - 2) for x in operands))
    return tokens.axes[operands[0]]


_READ_SHAPES = frozenset({"Expand", "Reshape"})
_ELEMENTWISE = """Abs Add And Cast Ceil Clip Cos DequantizeLinear Div Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log Max Min Mish Mod Mul Neg Not
    Or Pow QuantizeLinear Reciprocal Relu Round Sigmoid Sign Sin Softplus Sqrt Sub Swish Tanh Where Xor"""
_RULES: dict[str, Callable[[TokenAxes, ir.Node], Axis]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _broadcast),
    **dict.fromkeys(["LayerNormalization", "RMSNormalization"], _norm),
    **dict.fromkeys(["LogSoftmax", "Softmax", "Split"], _along_axis),
    **dict.fromkeys(["ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"], _reduce),
    **dict.fromkeys(["Gemm", "MatMul"], _product),
    **dict.fromkeys(["Flatten", "Reshape", "Squeeze", "Unsqueeze"], _reshape),
    "Attention": _attention,
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "RotaryEmbedding": _rotary,
    "Slice": _slice,
    "Transpose": _transpose,
}
