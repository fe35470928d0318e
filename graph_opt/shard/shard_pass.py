"""Cut a decoder's graph by weights: the graph of one of several processes that run the same steps together.

The scheme is Megatron's (https://arxiv.org/abs/1909.08053): heads and intermediate values are cut, so each
rank reads its part of the weights, and two sums over the ranks a layer give all of them the whole hidden
states. See ``docs/decisions/tensor-parallel-by-processes.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import GraphError
from ..graph.edit import add_initializer, constant, insert, int_attribute, shared_constant, weight
from ..passes.base import GraphPass
from ..passes.remove_unused import RemoveUnusedNodesPass
from ..passes.shape_inference import ShapeInferencePass
from .cuts import Cut
from .plan import PRODUCTS, NodePlan, Planner, ShardPlan
from .rules import target_sizes
from .weights import WeightCuts

DOMAIN = "carryall"
ALL_REDUCE, ALL_GATHER = "AllReduce", "AllGather"
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
# Operators whose result is a sum over ranks if the operand in the first place, or each operand, is one.
_LINEAR = frozenset({"Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Gather", "Slice", "Neg"})


class ShardPass(GraphPass):
    """Keep one rank's part of a canonical decoder graph; runs before a lowering.

    The graph of each rank has its heads of the KV cache, and returns its columns of the logits: together
    they are those of the whole graph. Ranks must run the same steps at the same time.

    Args:
        rank: from 0 to ``count`` - 1.
        count: number of ranks.

    Raises:
        GraphError: the graph cannot be cut; the message names the node.
    """

    def __init__(self, rank: int, count: int) -> None:
        super().__init__()
        self.rank, self.count = rank, count
        self.name = f"Shard {rank} of {count}"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, and remove what only other ranks need."""
        ShapeInferencePass()(model)
        result = super().call(model)
        RemoveUnusedNodesPass()(model)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Cut weights, and insert sums over the ranks."""
        weights = WeightCuts(graph, self.rank)
        planner = Planner(graph, weights, self.count)
        plan = planner.plan()
        _check_products(plan)
        _Rewriter(graph, weights, planner, plan, self.rank, self.count).rewrite()
        for node in plan.whole:
            self.refuse(node, "every rank computes this product")
        self.fired += len(plan.nodes)


def _check_products(plan: ShardPlan) -> None:
    """Refuse a graph of which no product is cut, but that of the logits: nothing would be gained.

    Raises:
        GraphError: there is none.
    """
    products = (node for node in plan.nodes if node.op_type in PRODUCTS)
    if all(node.outputs[0].is_graph_output() for node in products):
        where = f"; the last one is {plan.whole[0].op_type} {plan.whole[0].name}" if plan.whole else ""
        raise GraphError(f"no linear layer of the graph can be cut by ranks{where}")


def _resized(shape: ir.Shape | None, axis: int, size: int) -> ir.Shape | None:
    """Return a shape with another size of an axis."""
    sizes = None if shape is None else [*shape.dims[:axis], size, *(shape.dims[axis:][1:])]
    return None if sizes is None else ir.Shape(sizes)


class _Rewriter:
    """Carries out a plan, from the inputs to the outputs."""

    def __init__(
        self, graph: ir.Graph, weights: WeightCuts, planner: Planner, plan: ShardPlan, rank: int, count: int
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._shapes = planner.shapes
        self._plan = plan
        self._rank = rank
        self._count = count
        self._states: dict[ir.Value, Cut] = dict(plan.inputs)
        self._whole_shapes: dict[ir.Value, ir.Shape | None] = {}
        self._partial: set[ir.Value] = set()
        self._collectives = 0
        self._made: dict[tuple[ir.Value, Cut | None], ir.Value] = {}

    def rewrite(self) -> None:
        """Rewrite all nodes, then the shapes of inputs and outputs."""
        for node in list(self._graph):
            own = self._plan.nodes.get(node)
            if own is not None:
                self._cut(node, own)
            elif not self._add_parts(node):
                self._keep(node)
        for value in list(self._graph.outputs):
            wanted = self._plan.outputs.get(value)
            if self._states.get(value) != wanted or value in self._partial:
                raise GraphError(f"the output {value.name} is not computed as it is needed")
        for value, cut in self._plan.inputs.items():
            self._resize(value, cut)

    def _resize(self, value: ir.Value, cut: Cut) -> None:
        """Set the shape of this rank's part."""
        value.shape = _resized(value.shape, cut.axis, cut.local(self._rank))

    def _keep(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and not (node.op_type == "Shape" and value in self._states):
                node.replace_input_with(index, self._as(value, None, node))

    def _cut(self, node: ir.Node, node_plan: NodePlan) -> None:
        before = [self._shapes.of(value) for value in node.inputs]
        for index, (value, cut) in enumerate(zip(list(node.inputs), node_plan.inputs, strict=True)):
            if value is not None:
                node.replace_input_with(index, self._as(value, cut, node))
        self._change_sizes(node, node_plan, before)
        for value, cut in zip(node.outputs, node_plan.outputs, strict=True):
            if cut is not None:
                self._states[value] = cut
                self._whole_shapes[value] = value.shape
                self._resize(value, cut)
        if node_plan.partial:
            self._partial.add(node.outputs[0])

    def _change_sizes(self, node: ir.Node, node_plan: NodePlan, before: list[Any]) -> None:
        """Write this rank's sizes into the attributes and constants of a node."""
        cut = node_plan.outputs[0]
        attribute = {"Attention": "q_num_heads", "LinearAttention": "q_num_heads"}.get(node.op_type)
        if attribute is not None:
            for name in ("q_num_heads", "kv_num_heads"):
                if heads := int_attribute(node, name, 0):
                    share = (
                        node_plan.outputs[1]
                        if name == "kv_num_heads" and len(node_plan.outputs) > 1
                        else None
                    )
                    local = heads // self._count if share is None else share.local(self._rank)
                    node.attributes[name] = ir.AttrInt64(name, local)
        elif node.op_type == "RotaryEmbedding" and cut is not None and cut.axis == -1:
            heads = int_attribute(node, "num_heads", 0)
            if heads:
                local = cut.local(self._rank) * heads // cut.size
                node.attributes["num_heads"] = ir.AttrInt64("num_heads", local)
        elif node.op_type in ("Reshape", "Expand") and cut is not None:
            self._set_target(node, cut)
        elif node.op_type == "Split" and node_plan.inputs[0] is not None:
            cuts = [each for each in node_plan.outputs if each is not None]
            axis = int_attribute(node, "axis", 0)
            sizes = before[0]
            if cuts[0].axis == (axis if axis < 0 or sizes is None else axis - len(sizes)):
                local_sizes = np.array([each.local(self._rank) for each in cuts], np.int64)
                node.attributes.pop("num_outputs", None)
                if len(node.inputs) < 2:
                    node.resize_inputs(2)
                self._set_constant(node, 1, local_sizes)
        elif node.op_type == "Gather" and cut is not None and node_plan.inputs[0] is not None:
            indices, source = constant(node.inputs[1]), node_plan.inputs[0]
            if (indices is not None and (source.size, source.parts) != (cut.size, cut.parts)) or (
                indices is not None and self._gathers_axis(node, cut, before[0])
            ):
                # The indices are of the whole axis. This rank holds only some of its elements, in ascending
                # order, so a binary search gives their places in what it holds.
                held = source.indices(self._rank)
                local_indices = np.searchsorted(held, indices[cut.indices(self._rank)])
                self._set_constant(node, 1, local_indices.astype(np.int64))

    @staticmethod
    def _gathers_axis(node: ir.Node, cut: Cut, sizes: Any) -> bool:
        axis = int_attribute(node, "axis", 0)
        return (axis if axis < 0 or sizes is None else axis - len(sizes)) == cut.axis

    def _set_constant(self, node: ir.Node, index: int, content: np.ndarray) -> None:
        name = f"shard.{'_'.join(str(number).replace('-', 'm') for number in content.tolist())}"
        node.replace_input_with(index, shared_constant(self._graph, name, content.astype(np.int64)))

    def _set_target(self, node: ir.Node, cut: Cut) -> None:
        """Write this rank's size of an axis into the target of a Reshape or Expand."""
        sizes, local = target_sizes(node), cut.local(self._rank)
        if sizes is None or (sizes[cut.axis] or 0) < 1:
            return  # 0 copies the size of the input, which is cut; -1 computes it
        if None not in sizes:
            sizes[cut.axis] = local
            self._set_constant(node, 1, np.array(sizes, np.int64))
            return
        joined = node.inputs[1].producer() if node.inputs[1] is not None else None
        if joined is None:
            raise GraphError(f"the shape of {node.op_type} {node.name} is computed in an unknown way")
        inputs, behind = list(joined.inputs), -cut.axis
        for index in range(len(inputs) - 1, -1, -1):
            part = constant(inputs[index])
            if part is None:
                raise GraphError(f"the shape of {node.op_type} {node.name} is computed in an unknown way")
            if part.size >= behind:
                changed = part.copy()
                changed[-behind] = local
                inputs[index] = shared_constant(self._graph, f"shard.size_{local}", changed)
                break
            behind -= part.size
        own = insert(node, "Concat", inputs, {"axis": 0})
        node.replace_input_with(1, own.outputs[0])

    def _add_parts(self, node: ir.Node) -> bool:
        """Let a sum over ranks pass a linear operator; return False if the operator needs the whole sum."""
        parts = [value in self._partial for value in node.inputs if value is not None]
        if not any(parts) or node.domain or any(value in self._states for value in node.inputs):
            return False
        if node.op_type in ("Add", "Sub") and not all(parts):
            bias = node.inputs[1 - parts.index(True)]
            if weight(bias) is None or bias is None or (node.op_type == "Sub" and parts[1]):
                return False
            if self._rank:  # the first rank adds it
                node.replace_input_with(1 - parts.index(True), self._zeros(bias))
        elif node.op_type in ("Add", "Sub", "Concat"):
            if not all(parts):
                return False
        elif node.op_type in ("Mul", "MatMul"):
            if all(parts):
                return False
        elif node.op_type == "Div" or node.op_type in _LINEAR:
            if not parts[0] or any(parts[1:]):
                return False
        else:
            return False
        for index, value in enumerate(list(node.inputs)):
            if value is not None and value not in self._partial:
                node.replace_input_with(index, self._as(value, None, node))
        self._partial.add(node.outputs[0])
        return True

    def _zeros(self, bias: ir.Value) -> ir.Value:
        known = (bias, None)
        if known not in self._made:
            sizes, dtype = self._shapes.of(bias) or [], (bias.dtype or ir.DataType.FLOAT).numpy()
            zeros = ir.tensor(np.zeros([size or 0 for size in sizes], dtype))
            self._made[known] = add_initializer(self._graph, f"{bias.name}.elsewhere", zeros)
        return self._made[known]

    def _as(self, value: ir.Value, cut: Cut | None, before: ir.Node) -> ir.Value:
        """Return a value whole, or cut; by a sum, by joining its parts, or by taking a part."""
        if self._weights.shape(value) is not None:
            return value if cut is None else self._weights.part(value, cut, before)
        state = self._states.get(value)
        if value not in self._partial and state == cut:
            return value
        known = (value, cut)
        if known not in self._made:
            if value in self._partial:
                whole = self._made.get((value, None)) or self._collective(value, ALL_REDUCE, {}, before)
            elif state is not None:
                whole = self._made.get((value, None)) or self._joined(value, state, before)
            else:
                whole = value
            if whole is not value:
                self._made[value, None] = whole
            self._made[known] = whole if cut is None else self._part(whole, cut, before)
        return self._made[known]

    def _part(self, whole: ir.Value, cut: Cut, before: ir.Node) -> ir.Value:
        """Return this rank's part of a value that each rank has whole."""
        runs = cut.parts[self._rank]
        if len(runs) == 1:  # a view, where a chain of operators computes it
            ((start, stop),) = runs
            sizes = {0: start, 1: stop - start, 2: cut.size - stop}
            places = [place for place, size in sizes.items() if size]
            numbers = np.array([sizes[place] for place in places], np.int64)
            name = f"shard.{'_'.join(map(str, numbers))}"
            operands = [whole, shared_constant(self._graph, name, numbers)]
            split = insert(before, "Split", operands, {"axis": cut.axis}, num_outputs=len(places))
            for place, output in zip(places, split.outputs, strict=True):
                output.type = whole.type
                output.shape = _resized(whole.shape, cut.axis, sizes[place])
            return split.outputs[places.index(1)]
        indices = shared_constant(self._graph, f"shard.part_{len(self._made)}", cut.indices(self._rank))
        part = insert(before, "Gather", [whole, indices], {"axis": cut.axis}).outputs[0]
        part.type = whole.type
        return part

    def _joined(self, value: ir.Value, cut: Cut, before: ir.Node) -> ir.Value:
        """Return a value of which each rank has a part, whole."""
        if cut.axis != -1:
            raise GraphError(
                f"{before.op_type} {before.name} needs {value.name} whole, of which each rank has a part of "
                f"axis {cut.axis}; this form cannot be cut by ranks"
            )
        whole = sum(cut.local(rank) for rank in range(self._count))
        joined = self._collective(value, ALL_GATHER, {"whole": whole}, before)
        held = np.concatenate([cut.indices(rank) for rank in range(self._count)])
        places = np.array([int(np.flatnonzero(held == element)[0]) for element in range(cut.size)], np.int64)
        if not np.array_equal(places, np.arange(len(held))):
            order = add_initializer(self._graph, "shard.order", places)
            joined = insert(before, "Gather", [joined, order], {"axis": -1}).outputs[0]
            joined.type = value.type
        joined.shape = self._whole_shapes.get(value)
        return joined

    def _collective(
        self, value: ir.Value, operator: str, attributes: dict[str, Any], before: ir.Node
    ) -> ir.Value:
        """Insert an operator over all ranks, in float32."""
        operand, dtype = value, value.dtype
        if dtype in _HALVES:
            operand = insert(before, "Cast", [value], {"to": int(ir.DataType.FLOAT)}).outputs[0]
        self._collectives += 1
        identity = {"rank": self._rank, "ranks": self._count, "number": self._collectives}
        node = insert(before, operator, [operand], {**identity, **attributes}, domain=DOMAIN)
        node.name = f"{value.name}/{operator}"
        result = node.outputs[0]
        result.type = ir.TensorType(ir.DataType.FLOAT)
        if dtype in _HALVES and dtype is not None:
            result = insert(before, "Cast", [result], {"to": int(dtype)}).outputs[0]
            result.type = ir.TensorType(dtype)
        if operator == ALL_REDUCE:
            result.shape = value.shape
        return result
