"""Rows of pictures replace embeddings exactly where they are given, in float and quantized decoders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from tiny_models import write_tiny

from carryall.contract import AHEAD_WINDOWS, IMAGE_AHEAD, IMAGE_ROWS, IMAGE_STATES
from carryall.errors import GraphError
from carryall.exporter.package import Package
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.image_inputs import ImageInputsPass
from carryall.runtime.tasks.export import export


@pytest.mark.long
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_embedding_of_a_token_given_as_a_row_changes_nothing(
    quantize: str | None, tmp_path: Path
) -> None:
    export(write_tiny("llama", tmp_path / "checkpoint"), tmp_path / "package", quantize=quantize)
    model = Package.open(tmp_path / "package").load()
    plain = onnxruntime.InferenceSession(tmp_path / "package" / "model.onnx")
    change = ImageInputsPass()
    change(model)
    assert change.fired == 1
    (states_input,) = [value for value in model.graph.inputs if value.name == IMAGE_STATES]
    (gather,) = states_input.consumers()
    (lookup,) = gather.outputs[0].consumers()
    embedded = lookup.inputs[2]
    assert embedded is not None
    embedded.shape, embedded.type = ir.Shape(["batch", "sequence", 32]), ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(embedded)
    save_model(model, tmp_path / "seeing.onnx")
    seeing = onnxruntime.InferenceSession(tmp_path / "seeing.onnx")
    tokens = np.array([[5, 9, 200, 7]])
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(4)[None]}
    feeds |= {
        value.name: np.zeros((1, 2, 0, 8), np.float32) for value in plain.get_inputs() if "past" in value.name
    }
    expected = plain.run(["logits"], feeds)[0]
    text = {IMAGE_STATES: np.zeros((1, 32), np.float32), IMAGE_ROWS: np.full_like(tokens, -1)}
    logits, states = seeing.run(["logits", embedded.name], {**feeds, **text})
    np.testing.assert_array_equal(logits, expected)
    rows = np.concatenate([states[0, 1:3], np.zeros((1, 32), np.float32)])
    given = {IMAGE_STATES: rows, IMAGE_ROWS: np.array([[-1, 0, 1, -1]])}
    others = {**feeds, "input_ids": np.array([[5, 0, 0, 7]])}
    np.testing.assert_array_equal(seeing.run(["logits"], {**others, **given})[0], expected)
    assert np.abs(seeing.run(["logits"], {**others, **text})[0] - expected).max() > 1e-3


def test_a_decoder_with_two_look_ups_is_refused() -> None:
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    tables = [ir.val(name, const_value=ir.tensor(np.zeros((4, 2), np.float32), name=name)) for name in "ab"]
    nodes = [ir.node("Gather", [table, ids]) for table in tables]
    graph = ir.Graph([ids], [node.outputs[0] for node in nodes], nodes=nodes, initializers=tables,
                     opset_imports={"": 23})  # fmt: skip
    with pytest.raises(GraphError, match="2 look-ups"):
        ImageInputsPass()(ir.Model(graph, ir_version=11))


def test_tokens_of_a_picture_see_those_behind_them_in_layers_of_these_windows(tmp_path: Path) -> None:
    """Equal logits without pictures, others with one."""
    package = tmp_path / "package"
    export(write_tiny("gemma3_text", tmp_path / "checkpoint"), package)
    model = Package.open(package).load()
    windows = {
        int(n) for n in re.findall(r"mask_window_(\d+)", " ".join(str(node.name) for node in model.graph))
    }
    model.metadata_props[AHEAD_WINDOWS] = json.dumps([*windows, None])
    ImageInputsPass()(model)
    save_model(model, tmp_path / "seeing.onnx")
    seeing = onnxruntime.InferenceSession(tmp_path / "seeing.onnx")
    tokens = np.arange(9)[None] + 5
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(9)[None]}
    feeds |= {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in seeing.get_inputs()
        if "past" in value.name
    }
    feeds |= {IMAGE_STATES: np.zeros((1, 32), np.float32), IMAGE_ROWS: np.full_like(tokens, -1)}
    ahead = np.array([[0, 0, 3, 2, 1, 0, 0, 0, 0]], np.int32)
    text = seeing.run(["logits"], {**feeds, IMAGE_AHEAD: 0 * ahead})[0]
    plain = onnxruntime.InferenceSession(package / "model.onnx")
    kept = {value.name: feeds[value.name] for value in plain.get_inputs()}
    np.testing.assert_array_equal(text, plain.run(["logits"], kept)[0])
    seen = seeing.run(["logits"], {**feeds, IMAGE_AHEAD: ahead})[0]
    np.testing.assert_array_equal(seen[:, :2], text[:, :2])
    assert (np.abs(seen - text).max(axis=-1)[0, 2:] > 1e-4).all()
    # The last token of the picture can change its first one only in this direction.
    other = tokens.copy()
    other[0, 5] = 200
    changed = seeing.run(["logits"], {**feeds, "input_ids": other, IMAGE_AHEAD: ahead})[0]
    assert np.abs(changed - seen).max(axis=-1)[0, 2] > 1e-4
    np.testing.assert_array_equal(changed[:, :2], seen[:, :2])
