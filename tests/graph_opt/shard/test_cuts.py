"""Cuts of an axis, and cuts of weights, hold exactly the elements that they name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from carryall.errors import GraphError
from carryall.graph_opt.shard.cuts import Cut, even_cut, reshaped, runs_of
from carryall.graph_opt.shard.rules import heads_cut
from carryall.graph_opt.shard.weights import WeightCuts


def tagged(shape: list[int], cut: Cut, rank: int) -> npt.NDArray[np.int64]:
    """Numbers of the elements of a tensor that a rank holds."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return np.take(whole, cut.indices(rank), cut.axis)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_cut_behind_a_reshape_holds_the_same_elements(
    heads: int, size: int, count: int, tokens: int, data: st.DataObject
) -> None:
    shapes = [[1, tokens, heads * size], [1, tokens, heads, size], [tokens, heads, size]]
    before, after = data.draw(st.sampled_from(shapes)), data.draw(st.sampled_from(shapes))
    axis = -1 if before[-1] == heads * size and len(before) == 3 and before[0] == 1 else -2
    cut = even_cut(axis, before[axis], count)
    if cut is None:
        assert before[axis] < count
        return
    found = reshaped(cut, before, after)
    if found is None:
        return  # no axis of the result has these elements
    for rank in range(count):
        expected = tagged(before, cut, rank).reshape(-1)
        assert np.array_equal(np.sort(tagged(after, found, rank).reshape(-1)), np.sort(expected))


def test_flat_heads_become_heads_and_flat_again() -> None:
    flat = Cut(-1, 32, (((0, 16),), ((16, 32),)))
    heads = reshaped(flat, [None, None, 32], [None, None, 4, 8])
    assert heads == Cut(-2, 4, (((0, 2),), ((2, 4),)))
    assert heads is not None
    assert reshaped(heads, [None, None, 4, 8], [None, None, 32]) == flat


def test_a_cut_within_a_head_is_no_cut_of_heads() -> None:
    assert reshaped(Cut(-1, 32, (((0, 12),), ((12, 32),))), [1, 1, 32], [1, 1, 4, 8]) is None


def test_fewer_heads_of_keys_than_ranks_are_held_several_times() -> None:
    assert heads_cut(-3, 8, 4, 2) == Cut(-3, 2, (((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)))
    assert heads_cut(-3, 6, 4) is None
    assert heads_cut(-3, 12, 4, 3) is None


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_runs_keep_order_and_repetitions(indices: list[int]) -> None:
    cut = Cut(-1, 31, (runs_of(np.array(indices, np.int64)),))
    assert cut.indices(0).tolist() == indices
    assert cut.local(0) == len(indices)


def quantized(rows: int, columns: int, block: int) -> ir.Model:
    """Return a graph of one weight of 4 bits, dequantized with scales and zero points of blocks."""
    random = np.random.default_rng(0)
    blocks = -(-rows // block)
    levels = random.integers(-8, 8, (rows, columns)).astype(ml_dtypes.int4)
    zeros = random.integers(-8, 8, (blocks, columns)).astype(ml_dtypes.int4)
    scale = random.uniform(0.5, 2, (blocks, columns)).astype(np.float32)
    parts = {"weight": levels, "scale": scale, "zero": zeros}
    values = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in parts.items()]
    for value, array in zip(values, parts.values(), strict=True):
        value.shape = ir.Shape(array.shape)
        value.dtype = ir.DataType.from_numpy(array.dtype)
    node = ir.node("DequantizeLinear", values, {"axis": 0, "block_size": block})
    node.outputs[0].type, node.outputs[0].name = ir.TensorType(ir.DataType.FLOAT), "y"
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=values, name="g", opset_imports={"": 23})
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(("axis", "count", "block"), [(-2, 2, 32), (-1, 3, 32), (-1, 2, 128)])
def test_the_parts_of_a_quantized_weight_are_the_weight(axis: int, count: int, block: int) -> None:
    whole = dequantized(quantized(64, 6, block))
    cut = even_cut(axis, whole.shape[axis], count)
    assert cut is not None
    parts = []
    for rank in range(count):
        model = quantized(64, 6, block)
        output = model.graph.outputs[0]
        node = output.producer()
        assert node is not None
        part = WeightCuts(model.graph, rank).part(output, cut, node)
        model.graph.outputs[0] = part
        part.name, part.shape = "part", None
        model.graph.remove(node)
        parts.append(dequantized(model))
    assert np.array_equal(np.concatenate(parts, axis), whole)


def dequantized(model: ir.Model) -> npt.NDArray[np.float32]:
    results: Any = ReferenceEvaluator(ir.to_proto(model)).run(None, {})
    return np.asarray(results[0])


def with_minima(model: ir.Model, blocks: int) -> ir.Model:
    """Add minima of blocks to a dequantized weight, as weights of GGUF files have them."""
    (weight,) = model.graph.outputs
    rows, columns = 64, 6
    minima = np.random.default_rng(1).uniform(-1, 1, (blocks, 1, columns)).astype(np.float32)
    shapes = [np.array(shape, np.int64) for shape in ([blocks, rows // blocks, columns], [rows, columns])]
    values = []
    arrays: dict[str, npt.NDArray[Any]] = {"minima": minima, "blocked": shapes[0], "flat": shapes[1]}
    for name, array in arrays.items():
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
        value.dtype = ir.DataType.from_numpy(array.dtype)
        model.graph.register_initializer(value)
        values.append(value)
    blocked = ir.node("Reshape", [weight, values[1]])
    added = ir.node("Add", [blocked.outputs[0], values[0]])
    flat = ir.node("Reshape", [added.outputs[0], values[2]])
    model.graph.extend([blocked, added, flat])
    flat.outputs[0].type, flat.outputs[0].name = ir.TensorType(ir.DataType.FLOAT), "whole"
    model.graph.outputs[0] = flat.outputs[0]
    return model


@pytest.mark.parametrize(("axis", "count"), [(-2, 2), (-1, 3)])
def test_the_parts_of_a_weight_with_minima_are_the_weight(axis: int, count: int) -> None:
    whole = dequantized(with_minima(quantized(64, 6, 32), 2))
    cut = even_cut(axis, whole.shape[axis], count)
    assert cut is not None
    parts = []
    for rank in range(count):
        model = with_minima(quantized(64, 6, 32), 2)
        output = model.graph.outputs[0]
        node = output.producer()
        assert node is not None
        weights = WeightCuts(model.graph, rank)
        assert weights.fits(output, cut)
        model.graph.outputs[0] = weights.part(output, cut, node)
        parts.append(dequantized(model))
    assert np.array_equal(np.concatenate(parts, axis), whole)
    assert not weights.fits(output, Cut(-2, 64, (((0, 16),), ((16, 64),))))


def test_a_cut_within_blocks_is_refused() -> None:
    model = quantized(64, 6, 32)
    output = model.graph.outputs[0]
    node = output.producer()
    assert node is not None
    weights = WeightCuts(model.graph, 0)
    cut = Cut(-2, 64, (((0, 16),), ((16, 64),)))
    assert not weights.fits(output, cut)
    with pytest.raises(GraphError, match="blocks of 32 weights, which cuts divide"):
        weights.part(output, cut, node)
