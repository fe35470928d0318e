"""Change a graph's inputs and outputs from explicit past and present to slots of a shared KV buffer.

``attention_mask`` is removed. ``position_ids`` is removed too, and computed from the cache lengths, unless
the target accepts it as an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....contract import (
    ATTENTION_MASK,
    INPUT_IDS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    is_past,
    is_present,
)
from ....errors import GraphError, UnsupportedAttentionError
from ...graph.edit import MICROSOFT, insert, nodes_of, replace, shared_constant
from ...passes.base import GraphPass

_AXES = (("zero", 0), ("one", 1))


class SlotInputsPass(GraphPass):
    """Give the graph the inputs and outputs of the slot contract.

    Args:
        padded_prompts: new prompts may run together, padded on the right. Otherwise positions are computed
            without operations that mix host and device memory, which captured runs do not allow.
        position_inputs: keep ``position_ids`` as an input if it is read.

    Raises:
        UnsupportedAttentionError: an ``Attention`` was not lowered, or another node reads
            ``attention_mask`` or a cache.
        GraphError: an attention has no cache.
    """

    def __init__(self, *, padded_prompts: bool = True, position_inputs: bool = False) -> None:
        super().__init__()
        self.position_inputs = position_inputs
        self.padded_prompts = padded_prompts

    def rewrite(self, graph: ir.Graph) -> None:
        """Change inputs, outputs and positions."""
        left = [str(node.name) for node in nodes_of(graph, "Attention")]
        if left:
            raise UnsupportedAttentionError(
                f"attention {left[0]} (one of {len(left)}) was not lowered to GroupQueryAttention, "
                "so it cannot share a KV buffer"
            )
        for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
            if len(node.inputs) < 5 or node.inputs[3] is None:
                raise GraphError(f"attention {node.name} has no KV cache, so it cannot use a slot's")
        inputs = {str(value.name): value for value in graph.inputs}
        for value in inputs.values():
            _check_readers(value)
        positions = inputs.get(POSITION_IDS)
        unwanted = [ATTENTION_MASK, POSITION_IDS]
        if positions is not None and positions.uses() and self.position_inputs:
            unwanted.remove(POSITION_IDS)
        elif positions is not None and positions.uses():
            compute = _positions if self.padded_prompts else _last_positions
            replace(positions, compute(graph, inputs))
        _drop(graph, [value for name, value in inputs.items() if name in unwanted])
        for value in [*graph.inputs, *graph.outputs]:
            if (is_past(value.name) or is_present(value.name)) and value.shape is not None:
                value.shape = ir.Shape([value.shape[0], value.shape[1], "max_length", value.shape[3]])
        self.fired += 1


def _check_readers(value: ir.Value) -> None:
    for use in value.uses() if is_past(value.name) else ():
        if use.node.op_type != "GroupQueryAttention":
            raise UnsupportedAttentionError(
                f"{use.node.op_type} {use.node.name} reads {value.name}: its attention is not one operator"
            )


def _drop(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    for value in values:
        if value.uses():
            reader = next(iter(value.uses())).node
            raise UnsupportedAttentionError(
                f"{reader.op_type} {reader.name} reads {value.name}, which the slot contract does not have"
            )
        graph.inputs.remove(value)


def _positions(graph: ir.Graph, inputs: dict[str, ir.Value]) -> ir.Value:
    """Write position_ids [batch, sequence] computed from the cache lengths.

    The new tokens of a row end at ``seqlens_k``, except in a run of new prompts (sequence = total length),
    which start at 0 and are padded on the right.
    """
    first = graph[0]

    def whole(name: str, *value: int) -> ir.Value:
        return shared_constant(graph, f"slots.{name}", np.array(value, np.int64).reshape(-1))

    zero, one = whole("zero", 0), whole("one", 1)
    scalar_zero = shared_constant(graph, "slots.scalar_zero", np.array(0, np.int64))
    scalar_one = shared_constant(graph, "slots.scalar_one", np.array(1, np.int64))

    def op(op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
        return insert(first, op_type, operands, attributes).outputs[0]

    length = op("Squeeze", op("Shape", inputs[INPUT_IDS], start=1, end=2), zero)
    last = op("Unsqueeze", op("Cast", inputs[SEQLENS_K], to=int(ir.DataType.INT64)), one)
    on_cache = op("Sub", op("Add", last, one), length)
    total = op("Cast", inputs[TOTAL_SEQUENCE_LENGTH], to=int(ir.DataType.INT64))
    start = op("Where", op("Equal", length, total), zero, on_cache)
    return op("Add", start, op("Range", scalar_zero, length, scalar_one))


def _last_positions(graph: ir.Graph, inputs: dict[str, ir.Value]) -> ir.Value:
    """Write position_ids [batch, sequence] of rows whose new tokens end at ``seqlens_k``.

    Only Range reads from host memory and writes to device memory.
    """
    first = graph[0]

    def op(op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
        return insert(first, op_type, operands, attributes).outputs[0]

    zero, one = (shared_constant(graph, f"slots.{name}", np.array([size])) for name, size in _AXES)
    scalar_one = shared_constant(graph, "slots.scalar_one", np.array(1, np.int64))
    length = op("Squeeze", op("Shape", inputs[INPUT_IDS], start=1, end=2), zero)
    offsets = op("Range", op("Sub", scalar_one, length), scalar_one, scalar_one)
    last = op("Unsqueeze", op("Cast", inputs[SEQLENS_K], to=int(ir.DataType.INT64)), one)
    return op("Add", last, offsets)
