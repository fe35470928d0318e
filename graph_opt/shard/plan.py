"""The plan of a cut: which values of a graph each rank holds in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import Enum

import onnx_ir as ir

from ...contract import LOGITS, PAST_KEY
from ...errors import GraphError
from ...records import dataclass
from ..graph.edit import int_attribute
from .cuts import Cut, even_cut, repeated
from .rules import (
    ELEMENTWISE,
    NORMS,
    Shapes,
    Sizes,
    heads_cut,
    inputs_of,
    output_of,
    split_input,
    target_sizes,
)
from .weights import WeightCuts

PRODUCTS = frozenset({"MatMul", "Gemm"})


class Potential(Enum):
    """What a value could be cut by, beside a ``Cut``."""

    ANY = "any"  # it is a weight, or the result of products: it can be cut as others need it
    NONE = "none"


@dataclass(slots=True)
class NodePlan:
    """How a node is computed in part.

    Args:
        outputs: the cut of each output.
        inputs: the cut of each input; None is whole.
        partial: the first output is a sum of which each rank has a part.
    """

    outputs: list[Cut | None]
    inputs: list[Cut | None]
    partial: bool = False


@dataclass(slots=True)
class ShardPlan:
    """The cut of a graph.

    Args:
        nodes: of the nodes that are computed in part.
        inputs: of the inputs of the graph.
        outputs: of the outputs of the graph.
        whole: products that every rank computes.
    """

    nodes: dict[ir.Node, NodePlan] = field(default_factory=dict)
    inputs: dict[ir.Value, Cut] = field(default_factory=dict)
    outputs: dict[ir.Value, Cut] = field(default_factory=dict)
    whole: list[ir.Node] = field(default_factory=list)


class Planner:
    """Find the cut of a canonical decoder graph.

    Attentions and states are cut by heads, which decides what the products before them compute. Products
    are cut by outputs if all readers need a part only. In graphs with float weights, others whose input can
    be cut without further work are cut by inputs, and their results are added up. In graphs with quantized
    weights, others are cut by outputs, and their inputs and results are joined: kernels round what enters to
    int8, where the last bit of a sum over ranks would decide between two levels.

    Args:
        graph: the graph, with known shapes.
        weights: its weights.
        count: number of ranks.
    """

    def __init__(self, graph: ir.Graph, weights: WeightCuts, count: int) -> None:
        self._graph = graph
        self._weights = weights
        self._count = count
        self.shapes = Shapes(self._sizes, count)
        self._potentials: dict[ir.Value, Cut | Potential] = {}
        self._wanted: dict[tuple[ir.Node, int], Cut | None] = {}
        matrices = (self._weight_of(node) for node in graph)
        self._rounds = any(matrix is not None and weights.quantized(matrix) for matrix in matrices)

    def plan(self) -> ShardPlan:
        """Return the cut.

        Raises:
            GraphError: an attention or a state cannot be cut by heads.
        """
        plan = ShardPlan(outputs={**self._logits(), **self._caches()})
        for node in reversed(list(self._graph)):
            outputs = [self._agreed(value, plan) for value in node.outputs]
            node_plan = self._of_node(node, outputs)
            if node_plan is None:
                self._join_before_norm(node, outputs)
                if node.op_type in PRODUCTS and self._weight_of(node) is not None:
                    plan.whole.append(node)
                continue
            plan.nodes[node] = node_plan
            for index, cut in enumerate(node_plan.inputs):
                self._wanted.setdefault((node, index), cut)
            for value, cut in zip(node.outputs, node_plan.outputs, strict=True):
                if value.is_graph_output() and cut is not None:
                    plan.outputs[value] = cut
        for value in self._graph.inputs:
            cut = self._agreed(value, plan)
            if cut is not None:
                plan.inputs[value] = cut
        self._put_off_joins(plan)
        return plan

    def _put_off_joins(self, plan: ShardPlan) -> None:
        """Let parts pass operators that need nothing else whole: a mixture of experts has one join."""
        cuts = dict(plan.inputs)
        for node in self._graph:
            if node not in plan.nodes and not node.domain and len(node.outputs) == 1:
                parts = [None if value is None else cuts.get(value) for value in node.inputs]
                node_plan = self._of_parts(node, parts)
                if node_plan is not None and not node.outputs[0].is_graph_output():
                    plan.nodes[node] = node_plan
            if node in plan.nodes:
                outputs = zip(node.outputs, plan.nodes[node].outputs, strict=True)
                cuts.update({value: cut for value, cut in outputs if cut is not None})

    def _of_parts(self, node: ir.Node, parts: Sequence[Cut | None]) -> NodePlan | None:
        """Return how a node is computed of inputs as they are; None if it needs one that is cut otherwise."""
        index, cut = next(((index, cut) for index, cut in enumerate(parts) if cut is not None), (0, None))
        output = None if cut is None else output_of(node, index, cut, self.shapes)
        # Parts of another axis could not be joined behind it.
        wanted = None if output is None or output.axis != -1 else inputs_of(node, output, self.shapes)
        if not wanted or any(
            part != needed and self._weights.shape(value) is None
            for value, part, needed in zip(node.inputs, parts, wanted, strict=True)
        ):
            return None
        return NodePlan([output], wanted)

    def _sizes(self, value: ir.Value | None) -> Sizes | None:
        known = self._weights.shape(value)
        if known is not None:
            return list(known)
        if value is None:
            return None
        if value.shape is None:
            node = value.producer()
            if node is None or node.op_type != "Reshape":
                return None
            sizes = target_sizes(node)
            return (
                None if sizes is None else [size if size is not None and size > 0 else None for size in sizes]
            )
        return [size if isinstance(size, int) else None for size in value.shape]

    def _weight_of(self, node: ir.Node) -> ir.Value | None:
        """Return the weight of a product: a matrix that depends on no input of the graph."""
        value = node.inputs[1] if node.op_type in PRODUCTS else None
        shape = self._weights.shape(value)
        return value if shape is not None and len(shape) == 2 else None

    def _logits(self) -> dict[ir.Value, Cut]:
        """Return the cut of the logits by tokens of the vocabulary."""
        logits = next((value for value in self._graph.outputs if value.name == LOGITS), None)
        sizes = self._sizes(logits)
        size = None if sizes is None else sizes[-1]
        cut = None if size is None else even_cut(-1, size, self._count)
        return {} if cut is None or logits is None else {logits: cut}

    def _caches(self) -> dict[ir.Value, Cut]:
        """Return the cut of the caches of attention that is written as products, with sinks."""
        cuts: dict[ir.Value, Cut] = {}
        for value in self._graph.outputs:
            maker, sizes = value.producer(), self._sizes(value)
            if value.name == LOGITS or maker is None or maker.op_type != "Concat" or sizes is None:
                continue
            heads = sizes[1] if len(sizes) == 4 else None
            if heads is None or heads % self._count:
                raise GraphError(
                    f"{maker.op_type} {maker.name} has a cache of {heads} heads, which {self._count} ranks "
                    "cannot share equally"
                )
            cut = even_cut(-3, heads, self._count)
            if cut is not None:
                cuts[value] = cut
        return cuts

    def _agreed(self, value: ir.Value, plan: ShardPlan) -> Cut | None:
        """Return the cut that all readers of a value need; None if one needs the whole value."""
        cuts = {self._wanted.get((use.node, use.idx)) for use in value.uses() if not _beside(use.node, value)}
        if value.is_graph_output():
            cuts.add(plan.outputs.get(value))
        return next(iter(cuts)) if len(cuts) == 1 else None

    def _of_node(self, node: ir.Node, outputs: Sequence[Cut | None]) -> NodePlan | None:
        if node.domain or self._weights.shape(node.outputs[0]) is not None:
            return None
        if node.op_type in ("Attention", "LinearAttention"):
            return self._heads(node)
        if self._weight_of(node) is not None:
            return self._product(node, outputs[0])
        if node.op_type == "CausalConvWithState":
            return self._convolution(node, outputs[0])
        if node.op_type == "Split":
            cut = split_input(node, outputs, self.shapes)
            return None if cut is None else NodePlan(list(outputs), [cut, *[None] * (len(node.inputs) - 1)])
        if outputs[0] is None or len(node.outputs) > 1:
            return None
        inputs = inputs_of(node, outputs[0], self.shapes)
        return None if not inputs else NodePlan(list(outputs), inputs)

    def _join_before_norm(self, node: ir.Node, outputs: Sequence[Cut | None]) -> None:
        """Let a product before a norm of all heads be cut: its parts are joined, and the norm is whole."""
        maker = node.inputs[0].producer() if node.op_type in NORMS and node.inputs[0] is not None else None
        if maker is not None and outputs[0] is not None and self._weight_of(maker) is not None:
            self._wanted[node, 0] = outputs[0]

    def _product(self, node: ir.Node, output: Cut | None) -> NodePlan | None:
        """Cut a product by its outputs, or by its inputs."""
        matrix = self._weight_of(node)
        shape = self._weights.shape(matrix)
        if matrix is None or shape is None or int_attribute(node, "transA", 0):
            return None
        transposed = bool(int_attribute(node, "transB", 0))
        rows, columns = (-1, -2) if transposed else (-2, -1)
        rest: list[Cut | None] = [None] * (len(node.inputs) - 2)
        if output is None:
            cut = self._input_cut(node, shape[rows])
            if cut is None and not self._weights.quantized(matrix):
                return None  # such as a router: its choice must be that of the whole, to the bit
            if cut is not None and not self._rounds:
                return None if rest else NodePlan([None], [cut, cut.moved(rows)], partial=True)
            self._wanted[node, 0] = cut
            output = even_cut(-1, shape[columns], self._count, self._weights.block(matrix, columns))
        if output is None:
            return None
        if output.axis != -1:
            return NodePlan([output], [output, None, *rest]) if node.op_type == "MatMul" else None
        if not self._weights.fits(matrix, output.moved(columns)):
            return None
        biases = [output if value is not None else None for value in node.inputs[2:]]
        return NodePlan([output], [None, output.moved(columns), *biases])

    def _input_cut(self, product: ir.Node, size: int) -> Cut | None:
        """Return the cut of what a product reads that costs no further work; None if there is none."""
        able = self._potential(product.inputs[0])
        cut = even_cut(-1, size, self._count) if able is Potential.ANY else able
        return cut if isinstance(cut, Cut) and cut.axis == -1 else None

    def _heads(self, node: ir.Node) -> NodePlan:
        """Cut an attention, or a state, by heads of keys and values."""
        heads, groups, sizes = self._head_sizes(node)
        cut, of_groups = heads_cut(-3, heads, self._count), heads_cut(-3, heads, self._count, groups)
        if cut is None or of_groups is None or (of_groups.size != groups):
            raise GraphError(
                f"{node.op_type} {node.name} has {heads} heads and {groups} of keys and values, which "
                f"{self._count} ranks cannot share equally"
            )
        flat = len(self._sizes(node.inputs[0]) or [0] * 3) == 3
        inputs: list[Cut | None] = []
        if node.op_type == "LinearAttention":
            for index, value in enumerate(node.inputs):
                width = (self._sizes(value) or [None])[-1]
                head_cut = of_groups if index else cut
                total = groups if index else heads
                if index == 3:
                    inputs.append(of_groups)
                elif value is None or width is None or width % total:
                    inputs.append(None)
                else:
                    inputs.append(repeated(head_cut, -1, width // total))
            return NodePlan([repeated(of_groups, -1, sizes[1]), of_groups], inputs)
        inputs = [
            repeated(cut, -1, sizes[0]) if flat else cut,
            *(repeated(of_groups, -1, size) if flat else of_groups for size in sizes),
            self._mask_cut(node, heads, cut),
            *[of_groups] * (len(node.inputs) - 4),
        ]
        outputs: list[Cut | None] = [repeated(cut, -1, sizes[1]) if flat else cut, of_groups, of_groups]
        return NodePlan(outputs[: len(node.outputs)], inputs[: len(node.inputs)])

    def _head_sizes(self, node: ir.Node) -> tuple[int, int, tuple[int, int]]:
        """Return the numbers of heads of queries and of keys, and the sizes of a head of keys and values."""
        if node.op_type == "LinearAttention":
            groups = int_attribute(node, "kv_num_heads", 0)
            state = self._sizes(node.inputs[3]) or [None] * 4
            if not groups or state[-1] is None or state[-2] is None:
                raise GraphError(f"{node.op_type} {node.name} has a state of unknown sizes")
            return int_attribute(node, "q_num_heads", groups), groups, (state[-2], state[-1])
        caches = [self._sizes(value) for value in (node.inputs[4:6] or node.inputs[1:3])]
        query = self._sizes(node.inputs[0]) or []
        if len(caches) != 2 or any(sizes is None or len(sizes) != 4 for sizes in caches):
            raise GraphError(f"{node.op_type} {node.name} has keys of unknown sizes")
        known = [sizes for sizes in caches if sizes is not None]
        heads = int_attribute(node, "q_num_heads", 0) or (query[1] if len(query) == 4 else None)
        kv_heads, size, value_size = known[0][1], known[0][3], known[1][3]
        if heads is None or kv_heads is None or size is None or value_size is None:
            raise GraphError(f"{node.op_type} {node.name} has an unknown number of heads")
        return heads, kv_heads, (size, value_size)

    def _mask_cut(self, node: ir.Node, heads: int, cut: Cut) -> Cut | None:
        sizes = self._sizes(node.inputs[3]) if len(node.inputs) > 3 else None
        return cut if sizes is not None and len(sizes) > 2 and sizes[-3] == heads and heads > 1 else None

    def _convolution(self, node: ir.Node, output: Cut | None) -> NodePlan | None:
        if output is None or output.axis != -2:
            return None
        inputs = [output, output.moved(-3), output.moved(-1), output]
        own = [None if value is None else cut for value, cut in zip(node.inputs, inputs, strict=False)]
        return NodePlan([output for _ in node.outputs], own)

    def _potential(self, value: ir.Value | None) -> Cut | Potential:
        """Return how a value can be cut without computing it whole."""
        if value is None or self._weights.shape(value) is not None:
            return Potential.ANY
        if value not in self._potentials:
            self._potentials[value] = self._found_potential(value)
        return self._potentials[value]

    def _found_potential(self, value: ir.Value) -> Cut | Potential:
        node = value.producer()
        if node is None:
            sizes = self._sizes(value)
            if PAST_KEY.fullmatch(str(value.name)) or "past" in str(value.name):
                size = None if sizes is None or len(sizes) != 4 else sizes[1]
                cut = None if size is None or size % self._count else even_cut(-3, size, self._count)
                return cut or Potential.NONE
            return Potential.NONE
        if node.domain:
            return Potential.NONE
        if node.op_type in ("Attention", "LinearAttention"):
            cut = self._heads(node).outputs[node.outputs.index(value)]
            return cut or Potential.NONE
        if self._weight_of(node) is not None:
            return Potential.ANY
        if node.op_type in ELEMENTWISE or node.op_type == "MatMul":
            return self._joined(node)
        able = self._potential(node.inputs[0]) if node.inputs else Potential.NONE
        if isinstance(able, Cut):
            return output_of(node, 0, able, self.shapes) or Potential.NONE
        moves = (
            "RotaryEmbedding",
            "Split",
            "Reshape",
            "Transpose",
            "Unsqueeze",
            "Squeeze",
            "CausalConvWithState",
        )
        return able if node.op_type in moves and node.op_type not in NORMS else Potential.NONE

    def _joined(self, node: ir.Node) -> Cut | Potential:
        """Return how the result of operands can be cut, of which some are broadcast."""
        able = [self._potential(value) for value in node.inputs]
        behind = {
            output_of(node, index, cut, self.shapes) for index, cut in enumerate(able) if isinstance(cut, Cut)
        }
        if len(behind) > 1 or None in behind:
            return Potential.NONE
        joined = next(iter(behind), None)
        computed = [
            potential
            for value, potential in zip(node.inputs, able, strict=True)
            if self._weights.shape(value) is None
        ]
        if all(potential is Potential.NONE for potential in computed):
            return Potential.NONE
        axis = -1 if joined is None else joined.axis
        for value, potential in zip(node.inputs, able, strict=True):
            sizes = self._sizes(value)
            if potential is Potential.NONE and (sizes is None or (len(sizes) >= -axis and sizes[axis] != 1)):
                return Potential.NONE
        return joined or Potential.ANY


def _beside(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node reads only sizes of a value that no cut changes: batch and tokens."""
    if node.op_type != "Shape" or node.domain:
        return False
    start, end = int_attribute(node, "start", 0), int_attribute(node, "end", 0)
    rank = len(value.shape or ())
    return (
        rank > 0
        and end == start + 1
        and (start == 0 or (rank == 4 and start == 2) or (rank == 3 and start == 1))
    )
