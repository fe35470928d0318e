"""The best logits and their log-sum-exp as outputs of the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from engines import onnxruntime, reference
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.lower.outputs.top_logits import TopLogitsPass
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline import pipeline
from carryall.runtime.engine.sampling.candidates import top_candidates

HEADER = '<ir_version: 10, opset_import: ["": 23]>'


def graph(size: int) -> ir.Model:
    shape = f"batch, wanted, {size}"
    return ir.from_onnx_text(
        f"{HEADER} g (float[{shape}] x) => (float[{shape}] logits) {{logits = Identity(x)}}"
    )


@pytest.mark.parametrize("engine", [onnxruntime, reference])
def test_they_equal_the_best_logits_of_numpy(engine: object, tmp_path: Path) -> None:
    model = graph(500)
    TopLogitsPass(64)(model)
    ir.save(model, tmp_path / "top.onnx")
    x = np.round(np.random.default_rng(0).normal(0, 3, (3, 2, 500)), 1).astype(np.float32)  # with ties
    logits, best, token_ids, logsumexp = engine(tmp_path / "top.onnx")({"x": x})  # type: ignore[operator]
    expected = top_candidates(list(x.reshape(6, 500)), np.full(6, 64))
    assert np.array_equal(logits, x)
    assert np.array_equal(best.reshape(6, 64), expected.logits[:, :64])
    if engine is onnxruntime:  # the reference evaluator breaks ties as it likes
        assert np.array_equal(token_ids.reshape(6, 64), expected.token_ids[:, :64])
    assert logsumexp == pytest.approx(np.log(np.exp(x.astype(np.float64)).sum(axis=-1)), abs=1e-5)


def test_a_small_vocabulary_is_returned_whole() -> None:
    model = graph(10)
    TopLogitsPass(64)(model)
    assert [value.name for value in model.graph.outputs[1:]] == ["top_logits", "top_token_ids", "logsumexp"]
    assert model.graph.outputs[1].shape is not None
    assert model.graph.outputs[1].shape[-1] == 10


def test_it_is_an_option_of_the_slot_lowering(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "tiny"))
    names = [value.name for value in model.graph.outputs]
    pipeline.run(model, slot_passes(SlotOptions(context_length=64, top_logits=8)))
    added = [value.name for value in model.graph.outputs if value.name not in names]
    assert added == ["last_hidden_state", "top_logits", "top_token_ids", "logsumexp"]


def test_a_graph_without_logits_is_refused() -> None:
    model = ir.from_onnx_text(f"{HEADER} g (float[1] x) => (float[1] y) {{y = Neg(x)}}")
    with pytest.raises(GraphError, match="no output 'logits'"):
        TopLogitsPass(8)(model)
