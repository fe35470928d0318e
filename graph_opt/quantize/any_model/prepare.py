"""Prepare a graph for quantization: opset 13 or later, constants as initializers, batch norms folded."""

from __future__ import annotations

import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common

from ....errors import GraphError, UsageError
from ...passes.cleanup.remove_identities import RemoveIdentitiesPass
from ...passes.normalize.fold_constants import FoldConstantsPass
from ...pipeline.pipeline import run
from .fold_affine import FoldAffinePass

OLDEST = 13  # the first opset whose DequantizeLinear has per-axis scales


def prepare(model: ir.Model) -> ir.Model:
    """Bring a float model into the form that the passes of this package expect, without changing its results.

    Args:
        model: changed in place if its opset allows; use the returned model.

    Raises:
        UsageError: the model is already quantized.
        GraphError: its opset is below 13, and onnx's converter cannot raise it.
    """
    quantizers = (
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
    )
    found = next((node for node in model.graph.all_nodes() if node.op_type in quantizers), None)
    if found is not None:
        raise UsageError(f"the model is already quantized (it has a {found.op_type}); use the float model")
    model = _at_least_opset(model)
    if model.ir_version < 4:
        common.RemoveInitializersFromInputsPass()(model)  # IR versions below 4 list initializers as inputs
    common.InlinePass()(model)
    passes: list[ir.passes.PassBase] = [
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
        RemoveIdentitiesPass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.ShapeInferencePass(),
        FoldConstantsPass(),
        FoldAffinePass(),
        common.RemoveUnusedNodesPass(),
    ]
    model, _ = run(model, passes)
    name_everything(model)
    return model


def name_everything(model: ir.Model) -> None:
    """Give every value a unique name, for reports."""
    common.NameFixPass()(model)


def _at_least_opset(model: ir.Model) -> ir.Model:
    version = model.opset_imports.get("", OLDEST)
    if version >= OLDEST:
        return model
    try:
        raised = version_converter.convert_version(ir.to_proto(model), OLDEST)
    except (RuntimeError, ValueError, version_converter.ConvertError) as error:
        raise GraphError(
            f"the model has opset {version}, and onnx cannot convert it to opset {OLDEST}, which per-channel "
            f"scales need: {error}. Export it again with opset {OLDEST} or later"
        ) from error
    return ir.from_proto(raised)
