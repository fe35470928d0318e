"""Find out by evaluation which keys the mask of an Attention hides, and combine its masks into one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ...contract import ATTENTION_MASK, INPUT_IDS
from ...errors import GraphError
from ..graph.edit import insert, int_attribute, shared_constant
from . import probe
from .decoder_inputs import LOWEST, CausalMasks, find_input, first_cache

_SHORT = 64  # tokens; the length at which masks without integer constants are evaluated
_UNBOUNDED = 1 << 30  # larger constants mean "to the end", as in a Slice
_LARGEST_WINDOW = 4096  # masks with larger constants are not evaluated: that would be too slow


def known_meaning(graph: ir.Graph, mask: ir.Value) -> probe.MaskMeaning | str:
    """Return the meaning of an additive or boolean mask, or why it is unknown.

    If the graph has an input ``attention_mask``, the mask must hide padding.
    """
    numbers = integers_upstream(mask)
    if any(number > _LARGEST_WINDOW for number in numbers):
        return f"its mask uses the constant {max(numbers)}; the limit for evaluation is {_LARGEST_WINDOW}"
    length, padded = max([_SHORT, *(n + 2 for n in numbers)]), find_input(graph, ATTENTION_MASK) is not None
    try:
        return probe.mask_meaning(graph, mask, length, padded=padded)
    except GraphError as error:
        return str(error)


def integers_upstream(mask: ir.Value, known: Collection[ir.Value] = ()) -> list[int]:
    """Return the integer constants upstream of a mask; one of them may be its window.

    What is upstream of ``known`` values is left out.
    """
    numbers: set[int] = set()
    seen: set[ir.Value] = set(known)
    waiting = [mask]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        tensor, node = value.const_value, value.producer()
        if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
            number = abs(int(tensor.numpy().item()))
            numbers |= {number} if 1 < number < _UNBOUNDED else set()
        elif node is not None:
            waiting += [operand for operand in node.inputs if operand is not None]
    return sorted(numbers)


def joined_mask(graph: ir.Graph, masks: CausalMasks, node: ir.Node, *, padding: bool) -> ir.Value | None:
    """Return one additive mask for an Attention's mask operand, ``is_causal`` and the graph's padding.

    ``is_causal`` and a mask are intersected: query i sees key j if j <= past + i and the mask allows it.
    This is ONNX's specification. Its reference implementation takes the diagonal from the rows of the mask
    instead, and onnxruntime refuses masks with fewer rows than queries.

    Args:
        graph: the node's graph.
        masks: the graph's causal masks.
        node: an Attention.
        padding: whether to hide padding if the mask does not.

    Returns:
        The mask; None if the Attention has neither a mask nor ``is_causal``.
    """
    stated_mask = node.inputs[3] if len(node.inputs) > 3 else None
    causal = bool(int_attribute(node, "is_causal", 0))
    if stated_mask is None:
        return masks.additive() if causal else None
    hides_padding = any(value.name == ATTENTION_MASK for value in probe.inputs_of(stated_mask))
    hidden = ([masks.visible()] if causal else []) + ([masks.real()] if padding and not hides_padding else [])
    if stated_mask.dtype != ir.DataType.BOOL and not hidden:
        return stated_mask
    reader = next(node for node in graph if any(value is stated_mask for value in node.inputs))
    if stated_mask.dtype == ir.DataType.BOOL:
        seen = stated_mask
        for condition in hidden:
            seen = insert(reader, "And", [seen, condition]).outputs[0]
        return masks.as_numbers(seen, reader)
    lowest = shared_constant(graph, "mask.lowest", np.array(LOWEST, np.float32))
    mask = stated_mask
    for condition in hidden:
        mask = insert(reader, "Where", [condition, mask, lowest]).outputs[0]
    mask.shape, mask.dtype = stated_mask.shape, ir.DataType.FLOAT
    return mask


def is_canonical_mask(graph: ir.Graph, mask: ir.Value) -> bool:
    """Return whether a mask is computed exactly as ``CausalMasks`` would write it."""
    inputs = [find_input(graph, INPUT_IDS), find_input(graph, ATTENTION_MASK), first_cache(graph)]
    copies = [ir.val(str(x.name), x.dtype, x.shape) for x in inputs if x is not None]
    if len(copies) < len(inputs):
        return False
    scratch = ir.Graph(copies, [], nodes=[ir.node("Identity", copies[:1])], opset_imports=graph.opset_imports)
    masks = CausalMasks(scratch)
    return any(same_computation(mask, masks.additive(window)) for window in (None, *integers_upstream(mask)))


def same_computation(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Return whether two values are computed by equal nodes from inputs of the same names."""
    if a is b or a is None or b is None:
        return a is b
    first, other = a.producer(), b.producer()
    if first is None or other is None:
        return first is other and (_same_constant(a, b) if a.const_value is not None else a.name == b.name)
    kinds = [(node.domain, node.op_type, _attributes(node), len(node.inputs)) for node in (first, other)]
    return kinds[0] == kinds[1] and all(map(same_computation, first.inputs, other.inputs))


def _same_constant(a: ir.Value, b: ir.Value) -> bool:
    left, right = a.const_value, b.const_value
    if left is None or right is None or left.size > 8 or right.size > 8:
        return False
    return left.dtype == right.dtype and np.array_equal(left.numpy(), right.numpy())


def _attributes(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
