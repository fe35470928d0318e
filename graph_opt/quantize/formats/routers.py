"""Routers of mixtures of experts: products whose rounding would send tokens to other experts."""

from __future__ import annotations

import onnx_ir as ir

_ON_THE_WAY = frozenset({"Add", "Cast", "Reshape", "Sigmoid", "Softmax"})


def is_router(node: ir.Node) -> bool:
    """Whether the outputs of a product are chosen among: by TopK, perhaps behind a softmax."""
    return any(
        use.node.op_type == "TopK" or (use.node.op_type in _ON_THE_WAY and is_router(use.node))
        for use in node.outputs[0].uses()
    )
