"""Rows are selected before the first node that computes each row independently, not earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import evaluate, graph
from tiny_models import write_tiny

from carryall.exporter.export import export_package
from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.lower.outputs.wanted_rows import WantedRowsPass
from carryall.graph_opt.lower.pipelines.paged import paged_passes
from carryall.graph_opt.lower.pipelines.paged_form import OPERATOR
from carryall.graph_opt.pipeline.pipeline import run

TEXT = """
last_layer (float[tokens, 1, 4] x, float[tokens, 1, 4] residual, int64[wanted] logits_positions)
    => (float[wanted, 1, 4] logits) {
    %s
    projected = MatMul (mixed, weight)
    sum = Add (residual, projected)
    normed = RMSNormalization <axis = -1> (sum, scale)
    gate = Sigmoid (normed)
    gated = Mul (normed, gate)
    all = Add (sum, gated)
    logits = Gather <axis = 0> (all, logits_positions)
}"""


def last_layer(mixing: str) -> ir.Model:
    rng = np.random.default_rng(0)
    weight, scale = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 4), (4,)))
    model = graph(TEXT % mixing, weight=weight, scale=scale)
    for node in model.graph:
        node.outputs[0].shape = ir.Shape(["tokens", 1, 4])
    return model


def feeds() -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(1)
    x, residual = rng.normal(size=(2, 5, 1, 4)).astype(np.float32)
    return {"x": x, "residual": residual, "logits_positions": np.array([4, 1])}


@pytest.mark.parametrize(
    ("mixing", "sources"),
    [
        ("mixed = Sigmoid (x)", {"x", "residual"}),
        ("mixed = Softmax <axis = 0> (x)", {"mixed", "residual"}),
    ],
)
def test_the_gather_moves_up_to_nodes_that_mix_rows(mixing: str, sources: set[str]) -> None:
    model = last_layer(mixing)
    expected = evaluate(model, feeds())
    WantedRowsPass()(model)
    gathers = nodes_of(model.graph, "Gather")
    assert {value.name for node in gathers for value in node.inputs[:1] if value is not None} == sources
    np.testing.assert_array_equal(evaluate(model, feeds())[0], expected[0])


def test_outputs_for_all_rows_are_computed_for_all() -> None:
    model = last_layer("mixed = Sigmoid (x)")
    (gather,) = nodes_of(model.graph, "Gather")
    (everything,) = (value for value in gather.inputs if value is not None and value.name == "all")
    model.graph.outputs.append(everything)
    rewrites = WantedRowsPass()
    rewrites(model)
    assert rewrites.fired == 0
    assert [node.op_type for node in model.graph].count("Gather") == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt2", "phi3"])
def test_the_last_layer_s_products_compute_only_the_wanted_rows(family: str, tmp_path: Path) -> None:
    package = export_package(write_tiny(family, tmp_path / "checkpoint"), tmp_path / "package")
    model, _ = run(package.load(), paged_passes(64))
    nodes = list(model.graph)
    last = max(index for index, node in enumerate(nodes) if node.op_type == OPERATOR)
    chosen = {output for node in nodes_of(model.graph, "Gather") for output in node.outputs}
    first = next(node for node in nodes[last:] if node.op_type == "MatMul")
    assert first.inputs[0] in chosen
