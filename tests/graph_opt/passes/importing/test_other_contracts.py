"""Exported decoders without a cache, or for one token per run, are rewritten to the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.edit import add_initializer
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

pytest.importorskip("onnxruntime")
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2", "mistral"]


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def without_cache(model: ir.Model) -> None:
    """Remove the caches; the masks stay valid, as the past length is zero."""
    graph = model.graph
    first = next(value for value in graph.inputs if value.name == "past_key_values.0.key")
    for node in attentions(model):
        node.resize_inputs(4)
        node.resize_outputs(1)
    lengths = [use.node for use in first.uses() if use.node.op_type == "Shape"]
    nothing = add_initializer(graph, "nothing", np.array([0]))
    for node in lengths:
        node.outputs[0].replace_all_uses_with(nothing)
        graph.remove(node, safe=True)
    graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
    graph.inputs[:] = [value for value in graph.inputs if not str(value.name).startswith("past")]


def one_token(model: ir.Model) -> None:
    for value in model.graph.inputs:
        if value.name in ("input_ids", "position_ids"):
            value.shape = ir.Shape(["batch", 1])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_without_a_cache_gets_one(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "checkpoint")
    model = export_model(tmp_path / "checkpoint")
    ir.save(model, tmp_path / "whole.onnx")
    expected = interface(model)
    without_cache(model)
    RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "uncached.onnx")
    changed, _ = run(model, portable_passes())
    assert interface(changed) == expected
    ir.save(changed, tmp_path / "changed.onnx")
    for original in ("whole.onnx", "uncached.onnx"):
        found = verify(tmp_path / original, tmp_path / "changed.onnx")
        assert found.passed
        assert found.tokens is not None
        assert found.max_rel < 1e-5
        assert found.tokens.greedy_equal == found.tokens.steps


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_for_one_token_accepts_many(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "checkpoint")
    model = export_model(tmp_path / "checkpoint")
    ir.save(model, tmp_path / "whole.onnx")
    one_token(model)
    changed, _ = run(model, portable_passes())
    assert str(changed.graph.inputs[0].shape) == "[batch,sequence]"
    ir.save(changed, tmp_path / "changed.onnx")
    found = verify(tmp_path / "whole.onnx", tmp_path / "changed.onnx")
    assert found.passed
    assert found.tokens is not None
    assert found.max_rel < 1e-5
    assert found.tokens.greedy_equal == found.tokens.steps


def interface(model: ir.Model) -> tuple[set[str | None], set[str | None]]:
    return {value.name for value in model.graph.inputs}, {value.name for value in model.graph.outputs}
