"""The form of a graph that is to be quantized: opset 13 or later, constants as weights, norms folded."""

from __future__ import annotations

import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common

from ....errors import GraphError, UsageError
from ...passes.cleanup.remove_identities import RemoveIdentitiesPass
from ...passes.normalize.fold_constants import FoldConstantsPass
from ...passes.normalize.fold_scales import FoldScalesPass
from ...pipeline.pipeline import run

OLDEST = 13  # the first opset whose DequantizeLinear has a scale a channel


def prepare(model: ir.Model) -> ir.Model:
    """Bring a float model into the form that the passes of this package expect; the results stay the same.

    Args:
        model: changed in place where its opset allows; use the returned one.

    Raises:
        UsageError: it is quantized already.
        GraphError: it is of an opset below 13 that onnx's converter cannot raise.
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
        raise UsageError(
            f"the model is quantized already (it has a {found.op_type}); start from the float model"
        )
    model = _at_least_opset(model)
    if model.ir_version < 4:
        common.RemoveInitializersFromInputsPass()(model)  # such files must list them, and nobody feeds them
    common.InlinePass()(model)
    passes: list[ir.passes.PassBase] = [
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
        RemoveIdentitiesPass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.ShapeInferencePass(),
        FoldConstantsPass(),
        FoldScalesPass(),
        common.RemoveUnusedNodesPass(),
    ]
    model, _ = run(model, passes)
    name_everything(model)
    return model


def name_everything(model: ir.Model) -> None:
    """Give every value a name of its own, so that reports can speak of it."""
    common.NameFixPass()(model)


def _at_least_opset(model: ir.Model) -> ir.Model:
    version = model.opset_imports.get("", OLDEST)
    if version >= OLDEST:
        return model
    try:
        raised = version_converter.convert_version(ir.to_proto(model), OLDEST)
    except (RuntimeError, ValueError, version_converter.ConvertError) as error:
        raise GraphError(
            f"the model is of opset {version}, and onnx cannot raise it to {OLDEST}, which scales a channel "
            f"need: {error}. Export it again with opset {OLDEST} or later"
        ) from error
    return ir.from_proto(raised)
