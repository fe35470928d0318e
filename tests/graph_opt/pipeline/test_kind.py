"""Decoders are recognised by their inputs and outputs and by the masks of their attentions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph
from onnx_ir.passes import common
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import add_initializer
from carryall.graph_opt.pipeline.kind import generates


def without_cache(model: ir.Model, *, causal: bool) -> ir.Model:
    """Remove the caches of an exported decoder; its masks stay valid, as the past length is zero."""
    graph = model.graph
    first = next(value for value in graph.inputs if value.name == "past_key_values.0.key")
    for node in [node for node in graph if node.op_type == "Attention"]:
        node.resize_inputs(4 if causal else 3)
        node.resize_outputs(1)
    nothing = add_initializer(graph, "nothing", np.array([0]))
    for node in [use.node for use in first.uses() if use.node.op_type == "Shape"]:
        node.outputs[0].replace_all_uses_with(nothing)
        graph.remove(node, safe=True)
    graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
    graph.inputs[:] = [value for value in graph.inputs if not str(value.name).startswith("past")]
    common.RemoveUnusedNodesPass()(model)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_exported_decoder_is_recognised(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path)
    assert generates(export_model(tmp_path))


@pytest.mark.parametrize("causal", [True, False])
def test_a_graph_without_caches_is_a_decoder_only_if_causal(causal: bool, tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    assert generates(without_cache(export_model(tmp_path), causal=causal)) == causal


def test_a_graph_with_other_inputs_is_not_a_decoder(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    model = export_model(tmp_path)
    states = ir.val("encoder_hidden_states", ir.DataType.FLOAT, ["batch", "frames", 8])
    model.graph.inputs.append(states)
    assert not generates(model)


def test_other_graphs_are_left_as_they_are() -> None:
    image = graph("g (float[1, 3, 8, 8] input_ids) => (float[1, 3, 8, 8] y) { y = Relu(input_ids) }")
    names = graph("g (int64[B, S] input_ids) => (float[B, 12] logits) { c = Cast <to = 1> (input_ids) "
                  "logits = MatMul(c, w) }", w=np.ones((4, 12), np.float32))  # fmt: skip
    assert not generates(image)
    assert not generates(names)
