"""Find attention that reads the keys and values of an earlier layer."""

from __future__ import annotations

import onnx_ir as ir

_OUTPUTS = 3  # of the attention that owns a cache: result, present key, present value


def owner_of(node: ir.Node) -> ir.Node | None:
    """Return the attention whose present keys and values ``node`` attends to; None if it has its own."""
    key, value = node.inputs[1:3] if len(node.inputs) > 2 else (None, None)
    owner = None if key is None else key.producer()
    if owner is None or value is None or owner.op_type != "Attention" or len(owner.outputs) != _OUTPUTS:
        return None
    return owner if (key, value) == tuple(owner.outputs[1:]) and len(owner.inputs) > 5 else None
