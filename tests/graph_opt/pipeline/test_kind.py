"""Decoders are recognised by their inputs and outputs and by the masks of their attentions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import add_initializer
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass
from carryall.graph_opt.pipeline.kind import not_generating


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
    RemoveUnusedNodesPass()(model)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_exported_decoder_is_recognised(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path)
    assert not_generating(export_model(tmp_path)) is None


def test_a_causal_graph_without_caches_is_a_decoder(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    assert not_generating(without_cache(export_model(tmp_path), causal=True)) is None


def test_a_graph_that_is_not_causal_is_no_decoder(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    reason = not_generating(without_cache(export_model(tmp_path), causal=False))
    assert reason is not None
    assert re.fullmatch(r"AddCache refused \S+: it has no mask, so it is not causal", reason)


def test_a_graph_with_other_inputs_is_not_a_decoder(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    model = export_model(tmp_path)
    states = ir.val("encoder_hidden_states", ir.DataType.FLOAT, ["batch", "frames", 8])
    model.graph.inputs.append(states)
    expected = "its input encoder_hidden_states is no token ids, mask, positions or KV cache"
    assert not_generating(model) == expected


OTHERS = {
    "an image": (
        "g (float[1, 3, 8, 8] x) => (float[1, 3, 8, 8] y) { y = Relu(x) }",
        "the graph has no input input_ids and no output logits",
    ),
    "an embedding": (
        "g (int64[B, S] input_ids) => (float[B, S, 2] y) { y = Gather(w, input_ids) }",
        "the graph has no output logits",
    ),
    "no attention": (
        "g (int64[B, S] input_ids) => (float[B, S, 2] logits) { logits = Gather(w, input_ids) }",
        "it has no KV cache, and no attention to add one to",
    ),
    "an attention that is not fused": (
        """g (int64[B, S] input_ids) => (float[B, S, 2] logits) {
            x = Gather(w, input_ids) t = Transpose <perm = [0, 2, 1]> (x) s = MatMul(x, t)
            p = Softmax(s) q = Neg(p) logits = MatMul(q, x) }""",
        "it has no KV cache, and no attention to add one to: FuseAttention refused Softmax: there is no "
        "product of q and k before it, or no product with v after it",
    ),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_the_reason_names_what_a_graph_lacks(case: str) -> None:
    text, reason = OTHERS[case]
    assert not_generating(graph(text, w=np.ones((4, 2), np.float32))) == reason
