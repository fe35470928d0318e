"""A decoder of a fixed number of tokens is refused by every target, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.lower.kernels import CPU, DIRECTML
from carryall.graph_opt.lower.pipelines.paged import paged_passes
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.pipelines.standard import standard_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

Passes = Callable[[], list[ir.passes.PassBase]]


def of_tokens(count: int, folder: Path) -> ir.Model:
    model = export_model(write_tiny("llama", folder))
    for value in model.graph.inputs[:1]:
        value.shape = ir.Shape(["batch", count])
    return run(model, portable_passes())[0]


@pytest.mark.parametrize(
    "passes",
    [
        lambda: slot_passes(SlotOptions(context_length=16, kernels=CPU)),
        lambda: slot_passes(SlotOptions(context_length=16, kernels=DIRECTML)),
        lambda: paged_passes(16),
        lambda: standard_passes(16),
    ],
    ids=["cpu", "directml", "openvino", "tensorrt"],
)
def test_every_target_refuses_it(passes: Passes, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"exactly 8 tokens.*; export it with a dynamic sequence axis"):
        run(of_tokens(8, tmp_path), passes())
