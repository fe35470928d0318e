"""The passes that turn a decoder graph of any exporter into the canonical portable graph."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..passes.cache.add_cache import AddCachePass
from ..passes.cache.batch_axis import BatchAxisPass
from ..passes.cache.free_tokens import FreeTokensPass
from ..passes.cache.lift_static_cache import LiftStaticCachePass
from ..passes.cleanup.drop_guards import DropGuardsPass
from ..passes.cleanup.merge_duplicates import MergeDuplicatesPass
from ..passes.cleanup.remove_passthrough_inputs import RemovePassthroughInputsPass
from ..passes.fuse.fuse_activation import FuseActivationPass
from ..passes.fuse.fuse_attention import FuseAttentionPass
from ..passes.fuse.fuse_experts import FuseExpertsPass
from ..passes.fuse.fuse_layer_norm import FuseLayerNormPass
from ..passes.fuse.fuse_norm import FuseRMSNormPass
from ..passes.fuse.fuse_rotary import FuseRotaryPass
from ..passes.fuse.head_norms import HeadNormsPass
from ..passes.fuse.sink_attention import SeparateSinksPass, SinkAttentionPass
from ..passes.importing.contract_names import ContractNamesPass
from ..passes.importing.lift_attention import LiftAttentionPass
from ..passes.importing.lift_encoder import LiftEncoderPass
from ..passes.importing.lift_moe import LiftMoEPass
from ..passes.importing.lift_norms import LiftNormsPass
from ..passes.importing.lift_products import LiftProductsPass
from ..passes.importing.lift_rotary import LiftRotaryPass
from ..passes.importing.lift_states import LiftStatesPass
from ..passes.importing.lift_weights import LiftWeightsPass
from ..passes.importing.position_ids import PositionIdsPass
from ..passes.importing.split_projections import GemmToMatMulPass, SplitProjectionsPass
from ..passes.importing.tied_head import TiedHeadPass
from ..passes.importing.token_names import TokenNamesPass
from ..passes.normalize.canonical_mask import CanonicalMaskPass
from ..passes.normalize.fold_constants import FoldConstantsPass
from ..passes.normalize.fold_transposes import FoldTransposesPass
from ..passes.normalize.heads_axis import HeadsAxisPass
from ..passes.normalize.inline_branches import InlineBranchesPass
from ..passes.normalize.lower_opset import WriteSwishPass
from ..passes.normalize.move_qdq import MoveQDQPass
from ..passes.normalize.norm_before_transpose import NormBeforeTransposePass
from ..passes.normalize.raise_opset import RaiseOpsetPass
from ..passes.normalize.shapes_of_inputs import ShapesOfInputsPass
from ..passes.normalize.simplify_shapes import SimplifyShapesPass
from ..passes.remove_unused import RemoveUnusedNodesPass
from ..passes.shape_inference import ShapeInferencePass

_LARGEST_WEIGHT = 1 << 30  # elements


def canonical_passes() -> list[ir.passes.PassBase]:
    """Return the passes in order: normalise first, then fuse."""
    return [
        TokenNamesPass(),
        RemovePassthroughInputsPass(),
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
        LiftStatesPass(),
        SimplifyShapesPass(),
        InlineBranchesPass(),
        RemoveUnusedNodesPass(),
        LiftRotaryPass(),
        LiftAttentionPass(),
        FuseExpertsPass(),
        SimplifyShapesPass(),
        *_clean_up(),
        PositionIdsPass(),
        GemmToMatMulPass(),
        TiedHeadPass(),
        MoveQDQPass(),
        *_fusions(decoder=True),
        FuseAttentionPass(),
        DropGuardsPass(),
        SinkAttentionPass(cached=False),
        AddCachePass(),
        SeparateSinksPass(),
        CanonicalMaskPass(),
        FreeTokensPass(),
        BatchAxisPass(),
        SimplifyShapesPass(),
        *_clean_up(),
    ]


def canonical_text_passes() -> list[ir.passes.PassBase]:
    """Return the passes that bring a text encoder of another exporter to the form of carryall's, in order.

    Weights that are computed from stored integers are computed once: the graph's own runtime does so too, and
    kernels that round activations would not return its results.
    """
    return [
        common.InlinePass(),
        RaiseOpsetPass(),
        WriteSwishPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        ShapeInferencePass(),
        LiftEncoderPass(),
        LiftNormsPass(),
        LiftProductsPass(),
        FoldConstantsPass(budget=_LARGEST_WEIGHT),
        LiftRotaryPass(),
        LiftAttentionPass(),
        ShapesOfInputsPass(),
        SimplifyShapesPass(decoder=False),
        *_clean_up(),
        GemmToMatMulPass(),
        *_fusions(decoder=False),
        ShapeInferencePass(),
        FuseAttentionPass(plain=True),
        DropGuardsPass(),
        SimplifyShapesPass(decoder=False),
        *_clean_up(),
    ]


def _fusions(*, decoder: bool) -> list[ir.passes.PassBase]:
    """Return the passes that fuse what lies around attention."""
    return [
        HeadsAxisPass(),
        FoldTransposesPass(),
        SimplifyShapesPass(decoder=decoder),
        SplitProjectionsPass(),
        FuseRMSNormPass(),
        FuseLayerNormPass(),
        HeadNormsPass(),
        NormBeforeTransposePass(),
        FuseActivationPass(),
        FuseRotaryPass(),
    ]


def _clean_up() -> list[ir.passes.PassBase]:
    return [RemoveUnusedNodesPass(), MergeDuplicatesPass()]
