"""The passes that lower ``vision.onnx``, the tower of a model that sees, to a target's kernels."""

from __future__ import annotations

import onnx_ir as ir

from ...passes.remove_unused import RemoveUnusedNodesPass
from ...passes.shape_inference import ShapeInferencePass
from ...quantize.recipe import QuantizationRecipe
from ..attention.full_groups import FullGroupsPass
from ..attention.multi_head_attention import MultiHeadAttentionPass
from ..attention.patch_rows import PatchRowsPass
from ..chain.chain_pass import ChainPass
from ..kernels import Kernels
from ..older_opset import OlderOpsetPass
from ..products.merge import MergeProjectionsPass, PackedQKVPass
from ..products.padded_products import PaddedProductsPass
from ..products.quantized_linear import QuantizedLinearPass
from ..products.silu_and_mul import SiluAndMulPass
from ..quick_gelu import QuickGeluPass

_BLOCK = 128  # inputs with one scale


def tower_passes(kernels: Kernels, *, int8: bool) -> list[ir.passes.PassBase]:
    """Return the passes in order.

    Args:
        kernels: the capabilities of the target's kernels.
        int8: products with 8-bit weights and activations, by carryall's kernels.
    """
    passes: list[ir.passes.PassBase] = []
    if int8:
        passes += [ShapeInferencePass(), PaddedProductsPass(_BLOCK)]
        passes += QuantizationRecipe("int8-fast", block_size=_BLOCK).passes()[0]
        passes += [ShapeInferencePass(), PatchRowsPass("int8"), ShapeInferencePass()]
        passes += [MergeProjectionsPass(), QuantizedLinearPass(kernels.stored_tiles), PackedQKVPass()]
    # onnxruntime's attention in float32 takes 0.7 of the time of carryall's.
    passes += [ShapeInferencePass(), FullGroupsPass(), MultiHeadAttentionPass()]
    if int8:
        passes += [QuickGeluPass(), SiluAndMulPass()]
    passes += [RemoveUnusedNodesPass(), OlderOpsetPass(kernels.opset)]
    return [*passes, ChainPass(approximate=True)] if int8 else passes
