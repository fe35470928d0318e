"""Pipelines to standard ONNX. The lowering to a target is defined by the target: ``Provider.passes``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from ..passes.cleanup.drop_traces import DropTracesPass
from ..passes.cleanup.merge_duplicates import MergeDuplicatesPass
from ..passes.cleanup.remove_identities import RemoveIdentitiesPass
from ..passes.cleanup.residual_sums import ResidualSumsPass
from ..passes.fuse.fuse_activation import FuseActivationPass
from ..passes.fuse.fuse_layer_norm import FuseLayerNormPass
from ..passes.fuse.fuse_norm import FuseRMSNormPass
from ..passes.importing.lift_norms import LiftNormsPass
from ..passes.importing.lift_products import LiftProductsPass
from ..passes.importing.lift_weights import LiftWeightsPass
from ..passes.normalize.fold_constants import FoldConstantsPass
from ..passes.normalize.fold_input_scales import FoldInputScalesPass
from ..passes.normalize.fold_pads import FoldPadsPass
from ..passes.normalize.fold_scales import FoldScalesPass
from ..passes.normalize.fold_transposes import FoldTransposesPass
from ..passes.normalize.inline_branches import InlineBranchesPass
from ..passes.normalize.lower_opset import LowerOpsetPass, LowestOpsetPass, WriteSwishPass
from ..passes.normalize.move_qdq import MoveQDQPass
from ..passes.normalize.raise_opset import RaiseOpsetPass
from ..passes.normalize.simplify_shapes import SimplifyShapesPass
from ..passes.normalize.sink_transposes import SinkTransposesPass
from ..passes.normalize.whole_softmax import WholeSoftmaxPass
from ..passes.normalize.whole_windows import WholeWindowsPass
from ..passes.remove_unused import RemoveUnusedNodesPass
from .canonical import canonical_passes

_GROWTH = 1024  # bytes; larger folded constants would grow the file, and onnxruntime folds them on load


def portable_passes() -> list[ir.passes.PassBase]:
    """Return the passes that bring a decoder to canonical form in standard ONNX. Weights are not loaded."""
    return [*canonical_passes(), *_tidy(), LowerOpsetPass()]


def model_passes(
    lowering: Sequence[ir.passes.PassBase] = (), kept_products: Collection[int] = ()
) -> list[ir.passes.PassBase]:
    """Return the passes that simplify and fuse any other graph in standard ONNX. Weights are not loaded.

    Args:
        lowering: passes to run after the fusions, such as those of a target, before the opset is chosen.
        kept_products: widths of quantized weights for which the target has onnxruntime's MatMulNBits; those
            that do not round their activations stay, since standard operators would be rounded.
    """
    raised = RaiseOpsetPass()
    return [
        common.InlinePass(),
        raised,
        WriteSwishPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        RemoveIdentitiesPass(),
        FoldConstantsPass(growth=_GROWTH),
        LiftNormsPass(),
        LiftProductsPass(),
        LiftWeightsPass(decoder=False, kept=kept_products),
        SimplifyShapesPass(decoder=False),
        InlineBranchesPass(),
        RemoveUnusedNodesPass(),
        MergeDuplicatesPass(),
        WholeSoftmaxPass(),
        MoveQDQPass(decoder=False),
        FoldTransposesPass(),
        SinkTransposesPass(),
        SimplifyShapesPass(decoder=False),
        FuseRMSNormPass(),
        FuseLayerNormPass(),
        FuseActivationPass(),
        FoldPadsPass(),
        FoldScalesPass(),
        FoldInputScalesPass(),
        SimplifyShapesPass(decoder=False),
        WholeWindowsPass(),
        *lowering,
        ResidualSumsPass(),
        *_tidy(),
        DropTracesPass(),
        common.NameFixPass(),  # inlined functions may reuse names of values in a subgraph
        LowestOpsetPass(raised),
    ]


def _tidy() -> list[ir.passes.PassBase]:
    return [
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        RemoveIdentitiesPass(),
        MergeDuplicatesPass(),
        RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
    ]
