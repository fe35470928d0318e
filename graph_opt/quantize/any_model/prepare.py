"""The form of a graph that is to be quantized: optimized as by ``optimize``, every value with a name."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ....errors import GraphError, UsageError
from ...pipeline.pipeline import run
from ...pipeline.pipelines import model_passes

OLDEST = 13  # the first opset whose DequantizeLinear has per-axis scales


def prepare(model: ir.Model) -> ir.Model:
    """Optimize a float model; the results stay the same.

    Args:
        model: changed in place if its opset allows; use the returned model.

    Raises:
        UsageError: it is quantized already.
        GraphError: it is of an opset below 13 and has operators that cannot be raised.
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
    model, report = run(model, model_passes())
    version = model.opset_imports.get("", OLDEST)
    if version < OLDEST:
        reasons = [
            refusal.reason for one in report.passes for refusal in one.refusals if one.name == "RaiseOpset"
        ]
        raise GraphError(
            f"{'; '.join(dict.fromkeys(reasons))}. Scales a channel need opset {OLDEST}; export it with that "
            "or later"
        )
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.ShapeInferencePass()(model)
    name_everything(model)
    return model


def name_everything(model: ir.Model) -> None:
    """Give every value a unique name, for reports."""
    common.NameFixPass()(model)
