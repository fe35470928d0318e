"""The list that turns a decoder graph of any exporter into the canonical portable graph."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from .passes.add_cache import AddCachePass
from .passes.contract_names import ContractNamesPass
from .passes.drop_guards import DropGuardsPass
from .passes.drop_handed_on import DropHandedOnPass
from .passes.fold_constants import FoldConstantsPass
from .passes.fold_transposes import FoldTransposesPass
from .passes.free_tokens import FreeTokensPass
from .passes.fuse_activation import FuseActivationPass
from .passes.fuse_attention import FuseAttentionPass
from .passes.fuse_experts import FuseExpertsPass
from .passes.fuse_layer_norm import FuseLayerNormPass
from .passes.fuse_norm import FuseRMSNormPass
from .passes.fuse_rotary import FuseRotaryPass
from .passes.head_norms import HeadNormsPass
from .passes.lift_attention import LiftAttentionPass
from .passes.lift_moe import LiftMoEPass
from .passes.lift_norms import LiftNormsPass
from .passes.lift_products import LiftProductsPass
from .passes.lift_rotary import LiftRotaryPass
from .passes.lift_static_cache import LiftStaticCachePass
from .passes.lift_weights import LiftWeightsPass
from .passes.lower_opset import WriteSwishPass
from .passes.merge_duplicates import MergeDuplicatesPass
from .passes.move_qdq import MoveQDQPass
from .passes.norm_before_transpose import NormBeforeTransposePass
from .passes.one_mask import OneMaskPass
from .passes.position_ids import PositionIdsPass
from .passes.raise_opset import RaiseOpsetPass
from .passes.simplify_shapes import SimplifyShapesPass
from .passes.split_projections import GemmToMatMulPass, SplitProjectionsPass
from .passes.tied_head import TiedHeadPass
from .passes.token_names import TokenNamesPass


def canonical_passes() -> list[ir.passes.PassBase]:
    """Return the passes, in order: normalise first, then fuse once."""
    return [
        TokenNamesPass(),
        DropHandedOnPass(),
        ContractNamesPass(),
        common.InlinePass(),
        RaiseOpsetPass(),
        LiftStaticCachePass(),
        WriteSwishPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        FoldConstantsPass(),
        LiftNormsPass(),
        LiftProductsPass(),
        LiftWeightsPass(),
        LiftMoEPass(),
        SimplifyShapesPass(),
        common.RemoveUnusedNodesPass(),
        LiftRotaryPass(),
        LiftAttentionPass(),
        FuseExpertsPass(),
        SimplifyShapesPass(),
        *_clean_up(),
        PositionIdsPass(),
        GemmToMatMulPass(),
        TiedHeadPass(),
        MoveQDQPass(),
        FoldTransposesPass(),
        SimplifyShapesPass(),
        SplitProjectionsPass(),
        FuseRMSNormPass(),
        FuseLayerNormPass(),
        HeadNormsPass(),
        NormBeforeTransposePass(),
        FuseActivationPass(),
        FuseRotaryPass(),
        FuseAttentionPass(),
        DropGuardsPass(),
        AddCachePass(),
        OneMaskPass(),
        FreeTokensPass(),
        SimplifyShapesPass(),
        *_clean_up(),
    ]


def _clean_up() -> list[ir.passes.PassBase]:
    return [common.RemoveUnusedNodesPass(), MergeDuplicatesPass()]
