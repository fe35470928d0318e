"""Find an upper bound of a decoder's attention windows, so that a comparison can exceed it."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.edit import constant, int_attribute

_MASK_INPUT = 3  # index of Attention's mask
_FARTHEST = 8192  # longest synthetic cache


def mask_reach(graph: ir.Graph) -> int:
    """Return the largest attribute or mask constant, up to 8192, that may be a sliding window."""
    numbers = [0]
    for node in graph.all_nodes():
        numbers.append(int_attribute(node, "local_window_size", 0))
        if node.op_type == "Attention" and len(node.inputs) > _MASK_INPUT:
            numbers += _numbers_upstream(node.inputs[_MASK_INPUT])
    return max(number for number in numbers if number <= _FARTHEST)


def _numbers_upstream(value: ir.Value | None) -> list[int]:
    numbers: list[int] = []
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        small = current.const_value is None or current.const_value.size == 1
        content = constant(current) if small else None
        if content is not None and content.size == 1 and content.dtype.kind in "iuf":
            number = float(content.reshape(-1)[0])
            numbers += [abs(int(number))] if number.is_integer() else []
        node = current.producer()
        waiting += [] if node is None else list(node.inputs)
    return numbers
