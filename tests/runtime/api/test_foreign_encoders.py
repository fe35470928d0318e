"""Encoders of other exporters run without padding, and return what onnxruntime computes from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from foreign_encoders import FOLDER

from carryall.providers import get_provider
from carryall.runtime.api.text_session import JoinedTexts, PaddedTexts, Tokens, open_texts

JOINED = (
    *("optimum-bert", "optimum-roberta", "optimum-mpnet", "optimum-albert"),
    *("fused-bert", "fused-albert", "extended-roberta"),
)
RNG = np.random.default_rng(0)
TEXTS = [
    Tokens(RNG.integers(3, 256, length).tolist(), [0] * length, [], [], []) for length in (7, 1, 12, 3, 30)
]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if not get_provider("cpu").lowers_texts():
        pytest.skip("needs carryall's CPU kernels")


def expected(file: Path, length: int = 30) -> list[Any]:
    """The states of each text by onnxruntime, padded to ``length``."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    found = []
    for text in TEXTS:
        ids, mask = np.zeros((2, 1, length), np.int64)
        ids[0, : len(text.ids)], mask[0, : len(text.ids)] = text.ids, 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (states,) = session.run(None, {name: feed[name] for name in names})
        found.append(states[0, : len(text.ids)])
    return found


def check_rows(file: Path) -> None:
    session = open_texts(file, ("cpu",), 512)
    assert isinstance(session, JoinedTexts), session.padded
    (states,) = session.run(["last_hidden_state"], TEXTS)
    np.testing.assert_allclose(states, np.concatenate(expected(file)), rtol=1e-5, atol=1e-5)
    (alone,) = session.run(["last_hidden_state"], TEXTS[2:3])
    np.testing.assert_array_equal(alone, states[8:20])


@pytest.mark.parametrize("name", JOINED)
def test_a_graph_of_another_exporter_runs_without_padding(name: str) -> None:
    check_rows(FOLDER / f"{name}.onnx")


def test_weights_of_stored_integers_are_those_that_onnxruntime_computes(tmp_path: Path) -> None:
    """Weight-only int8 by Cast and Mul, or by DequantizeLinear: activations are not rounded."""
    model = ir.load(FOLDER / "optimum-bert.onnx")
    products = [node for node in model.graph if node.op_type == "MatMul"]
    weights = [node.inputs[1] for node in products if node.inputs[1] and node.inputs[1].is_initializer()]
    first = next(iter(model.graph))
    for place, weight in enumerate(weights):
        assert weight.const_value is not None
        values = weight.const_value.numpy()
        scale = np.asarray(np.abs(values).max(0) / 127, np.float32)
        stored = [ir.tensor(np.rint(values / scale).astype(np.int8)), ir.tensor(scale)]
        operands = [
            ir.val(f"{weight.name}_{number}", const_value=tensor) for number, tensor in enumerate(stored)
        ]
        for value in operands:
            model.graph.register_initializer(value)
        if place % 2:
            nodes = [ir.node("DequantizeLinear", operands, {"axis": 1})]
        else:
            nodes = [ir.node("Cast", operands[:1], {"to": ir.DataType.FLOAT})]
            nodes.append(ir.node("Mul", [nodes[0].outputs[0], operands[1]]))
        model.graph.insert_before(first, nodes)
        weight.replace_all_uses_with(nodes[-1].outputs[0])
        del model.graph.initializers[str(weight.name)]
    assert len(weights) > 11
    ir.save(model, tmp_path / "model.onnx")
    check_rows(tmp_path / "model.onnx")


def test_activations_with_one_scale_for_a_run_keep_their_padding() -> None:
    session = open_texts(FOLDER / "dynamic-bert.onnx", ("cpu",), 512)
    assert isinstance(session, PaddedTexts)
    assert "may mix the tokens of several texts" in str(session.padded)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # sums that do not saturate
    file = str(FOLDER / "dynamic-bert.onnx")
    raw = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    ids = np.array([TEXTS[0].ids])
    (states,) = raw.run(None, {"input_ids": ids, "attention_mask": ids // ids, "token_type_ids": ids - ids})
    (found,) = session.run(["last_hidden_state"], TEXTS[:1])
    np.testing.assert_allclose(found, states[0], rtol=1e-5, atol=1e-5)
