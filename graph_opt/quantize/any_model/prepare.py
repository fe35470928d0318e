"""Prepare a graph for quantization: run the passes of ``optimize`` and name every value."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ....errors import GraphError, UsageError
from ...graph.map_types import map_names
from ...pipeline.pipeline import run
from ...pipeline.pipelines import model_passes

OLDEST = 13  # the first opset whose DequantizeLinear has per-axis scales


def prepare(model: ir.Model) -> ir.Model:
    """Optimize a float model; the results stay the same.

    Args:
        model: changed in place if its opset allows; use the returned model.

    Raises:
        UsageError: the model is already quantized, or has maps.
        GraphError: its opset is below 13, and it has operators that cannot be converted to a newer opset.
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
    maps = map_names(model)
    if maps:
        raise UsageError(
            f"the model has maps ({maps[0]}), as classifiers return them; remove the operator that makes them"
        )
    model, report = run(model, model_passes())
    version = model.opset_imports.get("", OLDEST)
    if version < OLDEST:
        reasons = [
            refusal.reason for one in report.passes for refusal in one.refusals if one.name == "RaiseOpset"
        ]
        raise GraphError(
            f"{'; '.join(dict.fromkeys(reasons))}. Per-channel scales need opset {OLDEST}; export the model "
            f"again with opset {OLDEST} or later"
        )
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.ShapeInferencePass()(model)
    name_everything(model)
    return model


def name_everything(model: ir.Model) -> None:
    """Give every value a unique name, for reports."""
    common.NameFixPass()(model)
