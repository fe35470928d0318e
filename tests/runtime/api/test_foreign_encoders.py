"""Encoders of other exporters run without padding, and return what onnxruntime computes from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from foreign_encoders import FOLDER

from carryall.graph_opt.pipeline.canonical import canonical_text_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.runtime.api.text_session import JoinedTexts, Tokens, open_texts

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


def check_rows(file: Path, context_length: int = 512) -> None:
    session = open_texts(file, ("cpu",), context_length)
    assert isinstance(session, JoinedTexts), session.padded
    (states,) = session.run(["last_hidden_state"], TEXTS)
    np.testing.assert_allclose(states, np.concatenate(expected(file)), rtol=1e-5, atol=1e-5)
    (alone,) = session.run(["last_hidden_state"], TEXTS[2:3])
    np.testing.assert_array_equal(alone, states[8:20])


@pytest.mark.long
@pytest.mark.parametrize("name", JOINED)
def test_a_graph_of_another_exporter_runs_without_padding(name: str) -> None:
    check_rows(FOLDER / f"{name}.onnx")


@pytest.mark.long
@pytest.mark.parametrize("name", ["optimum-bert", "optimum-roberta", "optimum-albert"])
def test_tables_of_positions_may_be_short(name: str, tmp_path: Path) -> None:
    """Shapes are evaluated with fewer tokens where the usual sizes are beyond a table."""
    model = ir.load(FOLDER / f"{name}.onnx")
    cut = 0
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        array = value.const_value.numpy()
        if 512 in array.shape:
            cut += 1
            array = np.ascontiguousarray(array.take(range(44), array.shape.index(512)))
            value.const_value, value.shape = ir.tensor(array, name=value.name), ir.Shape(array.shape)
    assert cut
    ir.save(model, tmp_path / "model.onnx")
    check_rows(tmp_path / "model.onnx", 40)


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


DYNAMIC = ("dynamic-bert", "dynamic-roberta", "fused-dynamic-bert", "extended-dynamic-bert")


def write_without_rounding(file: Path, path: Path) -> None:
    """Write the products of a file with its weights, but without the rounding of their inputs.

    onnxruntime's own operators become standard ones first; the products, and their results, stay those of the
    file (see the test below).
    """
    model, _ = run(ir.load(file), canonical_text_passes())
    for node in [node for node in model.graph if node.op_type == "MatMulInteger"]:
        quantized, stored, _, *zeros = (value for value in node.inputs if value is not None)
        source = quantized.producer()
        assert source is not None
        assert stored.const_value is not None
        values = stored.const_value.numpy().astype(np.float32)
        for zero in zeros:
            assert zero.const_value is not None
            values = values - zero.const_value.numpy().astype(np.float32)
        weight = ir.val(f"{stored.name}_{node.name}_floats", const_value=ir.tensor(values))
        model.graph.register_initializer(weight)
        product = ir.node("MatMul", [source.inputs[0], weight])
        model.graph.insert_before(node, product)
        node.outputs[0].replace_all_uses_with(product.outputs[0])
    for node in [node for node in model.graph if node.op_type == "DynamicQuantizeLinear"]:
        one = ir.val(f"{node.outputs[1].name}_one", const_value=ir.tensor(np.array(1, np.float32)))
        model.graph.register_initializer(one)
        node.outputs[1].replace_all_uses_with(one)
    ir.save(model, path)


@pytest.mark.long
@pytest.mark.parametrize("name", DYNAMIC)
def test_products_of_rounded_inputs_round_the_rows_of_texts(name: str, tmp_path: Path) -> None:
    """The file has one scale for all tokens of a run, so its results depend on its padding; these do not.

    Sums are exact, so what differs from the file without rounding is the rounding of either; rows of 16 and
    24 elements, whose largest elements are alike, gain nothing from scales of their own.
    """
    file = FOLDER / f"{name}.onnx"
    session = open_texts(file, ("cpu",), 512)
    assert isinstance(session, JoinedTexts), session.padded
    (states,) = session.run(["last_hidden_state"], TEXTS)
    (alone,) = session.run(["last_hidden_state"], TEXTS[2:3])
    np.testing.assert_array_equal(alone, states[8:20])
    write_without_rounding(file, tmp_path / "exact.onnx")
    exact, rounded = (np.concatenate(expected(path)) for path in (tmp_path / "exact.onnx", file))
    errors = [float(np.sqrt(np.mean((found - exact) ** 2))) for found in (states, rounded)]
    assert 0 < errors[0] < 2 * errors[1], errors
    assert errors[1] < 0.01 * np.abs(exact).max()


@pytest.mark.long
@pytest.mark.parametrize("name", DYNAMIC)
def test_lifted_products_have_the_results_of_the_file(name: str, tmp_path: Path) -> None:
    """A unit in the last place may move an element to the next integer; most stay."""
    model, _ = run(ir.load(FOLDER / f"{name}.onnx"), canonical_text_passes())
    assert not any(node.domain for node in model.graph)
    ir.save(model, tmp_path / "lifted.onnx")
    lifted, own = (
        np.concatenate(expected(path)) for path in (tmp_path / "lifted.onnx", FOLDER / f"{name}.onnx")
    )
    assert np.median(np.abs(lifted - own)) < 1e-5
    np.testing.assert_allclose(lifted, own, rtol=0, atol=0.01 * np.abs(own).max())
