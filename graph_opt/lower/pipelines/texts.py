"""The passes that lower the portable graph of a text encoder to carryall's CPU kernels, without padding."""

from __future__ import annotations

import onnx_ir as ir

from ...passes.base import GraphPass
from ...passes.cleanup.residual_sums import BinarySumsPass
from ...passes.fuse.fuse_attention import FuseAttentionPass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ...passes.shape_inference import ShapeInferencePass
from ..attention.text_rows import TextRowsPass
from ..chain.chain_pass import ChainPass
from ..kernels import Kernels
from ..older_opset import OlderOpsetPass
from ..products.half_products import HalfProductsPass
from ..products.merge import MergeProjectionsPass, PackedQKVPass
from ..products.quantized_linear import QuantizedLinearPass
from ..products.silu_and_mul import SiluAndMulPass
from ..products.weight_only_products import WeightOnlyProductsPass
from ..quick_gelu import QuickGeluPass


def text_passes(kernels: Kernels) -> list[ir.passes.PassBase]:
    """Return the passes in order.

    Args:
        kernels: the capabilities of the target's kernels.
    """
    passes: list[GraphPass | ir.passes.PassBase] = [
        BinarySumsPass(),
        WeightOnlyProductsPass(static=False),
        ShapeInferencePass(),
        FuseAttentionPass(plain=True),
        ShapeInferencePass(),
        TextRowsPass(),
        ShapeInferencePass(),
        MergeProjectionsPass(),
        QuantizedLinearPass(kernels.stored_tiles),
        HalfProductsPass(wide=True, split=kernels.split_floats),
        PackedQKVPass(),
        QuickGeluPass(),
        SiluAndMulPass(),
        RemoveUnusedNodesPass(),
        OlderOpsetPass(kernels.opset),
        ChainPass(approximate=True),
    ]
    return passes
