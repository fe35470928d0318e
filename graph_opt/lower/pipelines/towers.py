"""The passes that lower ``vision.onnx``, the tower of a model that sees, to a target's kernels."""

from __future__ import annotations

from typing import Literal

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
from ..products.half_products import HalfProductsPass
from ..products.merge import MergeProjectionsPass, PackedQKVPass
from ..products.padded_products import PaddedProductsPass
from ..products.quantized_linear import QuantizedLinearPass
from ..products.silu_and_mul import SiluAndMulPass
from ..quick_gelu import QuickGeluPass

TowerForm = Literal["float32", "bfloat16", "int8"]
_BLOCK = 256  # inputs with one scale


def tower_passes(kernels: Kernels, form: TowerForm) -> list[ir.passes.PassBase]:
    """Return the passes in order.

    Args:
        kernels: the capabilities of the target's kernels.
        form: ``float32`` computes by onnxruntime's kernels. The others compute by carryall's: ``bfloat16``
            has keys and values of that type, and weights of 16 bits where these hold them; where AMX
            multiplies these, activations are rounded to bfloat16. ``int8`` has weights and activations of
            8 bits, and keys and values of 8 bits or, on AMX, whose softmax costs more than its products, of
            bfloat16.
    """
    passes: list[ir.passes.PassBase] = [ShapeInferencePass()]
    own = form != "float32"
    if form == "int8":
        passes += [PaddedProductsPass(_BLOCK)]
        passes += QuantizationRecipe("int8-fast", block_size=_BLOCK).passes()[0]
        passes += [ShapeInferencePass()]
    if own:
        cache = "bfloat16" if kernels.split_floats else form
        passes += [PatchRowsPass(cache), ShapeInferencePass(), MergeProjectionsPass()]
        passes += [QuantizedLinearPass(kernels.stored_tiles)]
        if form == "bfloat16":
            passes += [HalfProductsPass(wide=True, split=kernels.split_floats, rounds=kernels.split_floats)]
        passes += [PackedQKVPass(), ShapeInferencePass()]
    # onnxruntime's attention in float32 takes 0.7 of the time of carryall's.
    passes += [FullGroupsPass(), MultiHeadAttentionPass()]
    if own:
        passes += [QuickGeluPass(), SiluAndMulPass()]
    passes += [RemoveUnusedNodesPass(), OlderOpsetPass(kernels.opset)]
    return [*passes, ChainPass(approximate=True)] if own else passes
