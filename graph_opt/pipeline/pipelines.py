"""Named lists of passes. Those that lower to a target belong to the target: ``Provider.passes``."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..passes.cleanup.merge_duplicates import MergeDuplicatesPass
from ..passes.cleanup.remove_identities import RemoveIdentitiesPass
from ..passes.normalize.lower_opset import LowerOpsetPass
from .canonical import canonical_passes


def portable_passes() -> list[ir.passes.PassBase]:
    """Bring any graph to its canonical form, in standard ONNX. No weight is read whole."""
    return [
        *canonical_passes(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        RemoveIdentitiesPass(),
        MergeDuplicatesPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        LowerOpsetPass(),
    ]
