"""On which axis of every value a sequence's tokens lie, and whether anything but Attention mixes them.

Where nothing does, and every Attention looks back only, a token's logits depend on the tokens up to it alone:
so what a graph computes for a whole sequence is what it computes piece by piece on a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...contract import INPUT_IDS, LOGITS, POSITION_IDS
from ..graph.edit import constant, int_attribute
from .probe_sizes import Sizes
from .shape_facts import ShapeFacts

_MASK = 3  # the first operand of Attention that is no query, key or value


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of the tokens; ``flat`` if it holds those of all rows, one row after the other."""

    index: int
    flat: bool = False


class Mixed(Exception):  # noqa: N818 -- the reason of a refusal, not an error of the caller
    """A node that mixes tokens, or is not known to treat each by itself."""

    def __init__(self, node: ir.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class TokenAxes:
    """Follows the tokens of a decoder from its inputs to its logits.

    Args:
        graph: a decoder, its operators canonical where they can be.

    Attributes:
        sizes: the sets of sizes that shapes are known for.
        axes: of every value on the way that holds something for each token.

    Raises:
        Mixed: a node on the way mixes tokens.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._facts = ShapeFacts(graph)
        self.sizes = self._facts.probes
        self.axes = {value: Axis(1) for value in graph.inputs if value.name in (INPUT_IDS, POSITION_IDS)}
        self._varying = {value for value in graph.inputs if value not in self.axes}
        logits = next(value for value in graph.outputs if value.name == LOGITS)
        needed = _upstream(logits)
        for node in graph:
            if node in needed:
                self._follow(node)
        if self.axes.get(logits) != Axis(1):
            raise Mixed(next(iter(needed)), "the logits are not those of every token")

    def rank(self, value: ir.Value) -> int:
        """Return the number of axes of a value on the way."""
        return len(self.shapes(value)[0])

    def shapes(self, value: ir.Value) -> Sequence[Sequence[int]]:
        """Return a value's shape under each set of sizes."""
        found = self._facts.shapes(value)
        if found is None:
            raise Mixed(value.producer() or ir.node("Input", []), f"the shape of {value.name} is not known")
        return found

    def operand(self, node: ir.Node, index: int) -> ir.Value:
        """Return an operand that is there."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise Mixed(node, f"{node.op_type} has no operand {index}")
        return value

    def insist(self, node: ir.Node, condition: bool) -> None:
        """Refuse a node unless a condition holds."""
        if not condition:
            raise Mixed(node, f"{node.op_type} mixes tokens, or is not known to treat each by itself")

    def _follow(self, node: ir.Node) -> None:
        operands = [value for value in _operands(node) if value is not None]
        if node.op_type == "Expand":  # copies of a constant are as constant as it is
            operands = operands[:1]
        varying = any(value in self._varying for value in operands)
        if node.op_type == "Shape" or not any(value in self.axes for value in operands):
            if varying or node.op_type == "Shape":
                self._varying.update(node.outputs)
            return
        rule = None if node.domain else _RULES.get(node.op_type)
        if rule is None:
            raise Mixed(node, f"{node.op_type} is not known to treat each token by itself")
        self.insist(node, not varying or node.op_type in _READ_SHAPES)
        axis = rule(self, node)
        for output in node.outputs[:1] if node.op_type == "Attention" else node.outputs:
            self.axes[output] = axis


def _operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return what a node reads, without the mask and the cache of an Attention."""
    return node.inputs[:_MASK] if node.op_type == "Attention" and not node.domain else node.inputs


def _upstream(value: ir.Value) -> dict[ir.Node, None]:
    found: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found[node] = None
            waiting += [operand for operand in _operands(node) if operand is not None]
    return found


def _broadcast(walk: TokenAxes, node: ir.Node) -> Axis:
    """Tokens must lie on one axis, counted from the last, on which anything else is broadcast."""
    operands = [value for value in node.inputs if value is not None]
    ends = {walk.rank(x) - walk.axes[x].index for x in operands if x in walk.axes}
    kinds = {walk.axes[x].flat for x in operands if x in walk.axes}
    walk.insist(node, len(ends) == len(kinds) == 1)
    end = ends.pop()
    for other in operands:
        if other not in walk.axes and walk.rank(other) >= end:
            walk.insist(node, all(shape[-end] == 1 for shape in walk.shapes(other)))
    return Axis(max(map(walk.rank, operands)) - end, kinds.pop())


def _first(walk: TokenAxes, node: ir.Node) -> Axis:
    """Return the axis of the first operand, the only one with tokens."""
    first = walk.operand(node, 0)
    walk.insist(
        node, first in walk.axes and not any(value in walk.axes for value in node.inputs[1:] if value)
    )
    return walk.axes[first]


def _norm(walk: TokenAxes, node: ir.Node) -> Axis:
    """It works on the axes from ``axis`` on."""
    found, rank = _first(walk, node), walk.rank(walk.operand(node, 0))
    walk.insist(node, int_attribute(node, "axis", -1) % rank > found.index)
    for scale in node.inputs[1:]:
        walk.insist(node, scale is None or walk.rank(scale) < rank - found.index)
    return found


def _along_axis(walk: TokenAxes, node: ir.Node) -> Axis:
    found, rank = _first(walk, node), walk.rank(walk.operand(node, 0))
    walk.insist(node, int_attribute(node, "axis", 0 if node.op_type == "Split" else -1) % rank != found.index)
    return found


def _concat(walk: TokenAxes, node: ir.Node) -> Axis:
    operands = [walk.operand(node, index) for index in range(len(node.inputs))]
    found = walk.axes.get(operands[0])
    walk.insist(node, found is not None and all(walk.axes.get(value) == found for value in operands))
    axis = walk.axes[operands[0]]
    walk.insist(node, int_attribute(node, "axis", 0) % walk.rank(operands[0]) != axis.index)
    return axis


def _slice(walk: TokenAxes, node: ir.Node) -> Axis:
    found, rank = _first(walk, node), walk.rank(walk.operand(node, 0))
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else range(rank)
    walk.insist(node, axes is not None and found.index not in {int(axis) % rank for axis in axes})
    return found


def _reduce(walk: TokenAxes, node: ir.Node) -> Axis:
    found, rank = _first(walk, node), walk.rank(walk.operand(node, 0))
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = [] if given is None else [int(axis) % rank for axis in given]
    walk.insist(node, bool(axes) and found.index not in axes)
    gone = 0 if int_attribute(node, "keepdims", 1) else sum(axis < found.index for axis in axes)
    return Axis(found.index - gone, found.flat)


def _product(walk: TokenAxes, node: ir.Node) -> Axis:
    """Each token's features times one matrix, or one matrix times each token as a column."""
    x, matrix = walk.operand(node, 0), walk.operand(node, 1)
    if x not in walk.axes:
        walk.insist(node, node.op_type == "MatMul" and walk.rank(x) <= walk.rank(matrix))
        walk.insist(node, walk.axes[matrix] == Axis(walk.rank(matrix) - 1))
        return walk.axes[matrix]
    found = _first(walk, node)
    walk.insist(node, walk.rank(matrix) == 2 and found.index < walk.rank(x) - 1)
    walk.insist(node, not int_attribute(node, "transA", 0))
    if len(node.inputs) > 2:
        bias = walk.operand(node, 2)
        walk.insist(node, walk.rank(bias) < 2 or all(shape[0] == 1 for shape in walk.shapes(bias)))
    return found


def _gather(walk: TokenAxes, node: ir.Node) -> Axis:
    """Rows of a table at each token's number, or some of each token's features."""
    data, index = walk.operand(node, 0), walk.operand(node, 1)
    axis = int_attribute(node, "axis", 0) % walk.rank(data)
    if data not in walk.axes:
        return Axis(axis + walk.axes[index].index, walk.axes[index].flat)
    found = _first(walk, node)
    walk.insist(node, axis != found.index)
    return found if found.index < axis else Axis(found.index - 1 + walk.rank(index), found.flat)


def _transpose(walk: TokenAxes, node: ir.Node) -> Axis:
    found, rank = _first(walk, node), walk.rank(walk.operand(node, 0))
    perm = node.attributes.get("perm")
    order = list(range(rank))[::-1] if perm is None else list(perm.as_ints())
    walk.insist(node, not found.flat or order[0] == 0)
    return Axis(order.index(found.index), found.flat)


def _reshape(walk: TokenAxes, node: ir.Node) -> Axis:
    """The tokens keep an axis of their own, or one with those of other rows."""
    x = walk.operand(node, 0)
    walk.insist(node, x in walk.axes)
    before, after = walk.shapes(x), walk.shapes(node.outputs[0])
    for new in [*(Axis(index) for index in range(len(after[0]))), Axis(0, flat=True)]:
        if all(_keeps(walk.axes[x], new, *given) for given in zip(before, after, walk.sizes, strict=True)):
            return new
    raise Mixed(node, "Reshape tears tokens apart, or joins them")


def _keeps(old: Axis, new: Axis, before: Sequence[int], after: Sequence[int], sizes: Sizes) -> bool:
    """Whether a change of shape keeps the tokens in order, each by itself."""
    lead = math.prod(before[: old.index])
    if new.flat:
        return (old.flat or lead == sizes.batch) and after[:1] == (sizes.batch * sizes.sequence,)
    if old.flat:
        return new.index == 1 and tuple(after[:2]) == (sizes.batch, sizes.sequence)
    return math.prod(after[: new.index]) == lead and after[new.index] == before[old.index]


def _expand(walk: TokenAxes, node: ir.Node) -> Axis:
    found, x, output = walk.axes.get(walk.operand(node, 0)), walk.operand(node, 0), node.outputs[0]
    index = (found.index if found is not None else 0) + walk.rank(output) - walk.rank(x)
    pairs = zip(walk.shapes(x), walk.shapes(output), strict=True)
    walk.insist(node, found is not None and not found.flat)
    walk.insist(node, all(before[index - len(after)] == after[index] for before, after in pairs))
    return Axis(index)


def _rotary(walk: TokenAxes, node: ir.Node) -> Axis:
    x, *angles = [walk.operand(node, index) for index in range(3)]
    walk.insist(node, len(node.inputs) == 3 and all(walk.axes.get(angle) == Axis(1) for angle in angles))
    walk.insist(node, walk.axes.get(x) == Axis(walk.rank(x) - 2))
    return walk.axes[x]


def _attention(walk: TokenAxes, node: ir.Node) -> Axis:
    operands = [walk.operand(node, index) for index in range(_MASK)]
    walk.insist(node, all(walk.axes.get(x) == Axis(walk.rank(x) - 2) for x in operands))
    return walk.axes[operands[0]]


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
