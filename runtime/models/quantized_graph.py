"""Quantize a graph by a recipe, for ``export``, ``quantize`` and the packages in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.report import PipelineReport
from ...graph_opt.quantize.left_float import LeftFloat, float_matrices, left_float
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress
from ...records import dataclass
from .float_model import FloatModel, FloatSource


@dataclass(frozen=True, slots=True)
class QuantizedGraph:
    """A quantized graph, and how it was quantized.

    Args:
        model: the graph.
        passes: the passes that quantized it.
        record: the package's record of the quantization.
        left: the weights that stayed float.
        report: what the passes did.
    """

    model: ir.Model
    passes: Sequence[GraphPass]
    record: dict[str, Any]
    left: LeftFloat
    report: PipelineReport


def float_model(
    source: FloatSource,
    model: ir.Model,
    recipe: QuantizationRecipe,
    scratch: Path,
    progress: Progress | None,
    *,
    keeps: bool = False,
) -> FloatModel:
    """Return a model that can be measured on the recipe's calibration text; see ``FloatModel``."""
    text = None if recipe.calibration is None else Path(recipe.calibration)
    tokens = recipe.calibration_tokens
    return FloatModel(source, model, text, scratch, tokens=tokens, progress=progress, keeps=keeps)


def quantize_graph(model: ir.Model, measured: FloatModel, recipe: QuantizationRecipe) -> QuantizedGraph:
    """Quantize a graph, which may be changed in place.

    Args:
        model: the float graph.
        measured: its measurements, made when the recipe needs them.
        recipe: what to quantize, and how.

    Raises:
        UsageError: the recipe does not fit the model.
        GraphError: a weight or an activation is NaN or infinite.
    """
    matrices = float_matrices(model)
    passes, record = recipe.passes(measured)
    model, report = run(model, passes)
    left = left_float(matrices, model, [refusal for _, refusal in report.refusals])
    return QuantizedGraph(model, passes, _with_outcome(record, left, report), left, report)


def _with_outcome(record: dict[str, Any], left: LeftFloat, report: PipelineReport) -> dict[str, Any]:
    """Return the record with what the passes did: no rotation that was refused, and weights left float."""
    if record.get("rotate") and not any(one.fired for one in report.passes if one.name == "Rotate"):
        record = {**record, "rotate": False}
    return {**record, "left_float": left.to_dict()} if left.weights and "method" in record else record
