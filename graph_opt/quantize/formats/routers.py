"""Find the routers of mixtures of experts. They are not quantized, because tokens would change experts."""

from __future__ import annotations

import onnx_ir as ir

_BEFORE_TOP_K = frozenset({"Add", "Cast", "Reshape", "Sigmoid", "Softmax"})


def is_router(node: ir.Node) -> bool:
    """Return whether a TopK reads the result of a product, possibly after a softmax."""
    return any(
        use.node.op_type == "TopK" or (use.node.op_type in _BEFORE_TOP_K and is_router(use.node))
        for use in node.outputs[0].uses()
    )
