"""The passes that lower a portable graph other than a decoder to a target's kernels."""

from __future__ import annotations

import onnx_ir as ir

from ...passes.fuse.fuse_attention import FuseAttentionPass
from ...passes.normalize.simplify_shapes import SimplifyShapesPass
from ..attention.multi_head_attention import MultiHeadAttentionPass
from ..kernels import Kernels
from ..older_opset import MicrosoftGeluPass, OlderOpsetPass


def graph_passes(kernels: Kernels) -> list[ir.passes.PassBase]:
    """Return the passes in order.

    Args:
        kernels: the capabilities of the target's kernels.
    """
    passes: list[ir.passes.PassBase] = []
    if kernels.multi_head_attention:
        passes += [FuseAttentionPass(plain=True), MultiHeadAttentionPass(), SimplifyShapesPass(decoder=False)]
    if not kernels.standard_gelu:
        passes.append(MicrosoftGeluPass())
    return [*passes, OlderOpsetPass(kernels.opset)]
