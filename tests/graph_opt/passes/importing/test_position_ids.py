from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.passes.importing.position_ids import PositionIdsPass

COUNTED = """s = Shape <start = 1, end = 2> (input_ids) n = Squeeze(s) ps = Shape <start = 2, end = 3> (past)
    p = Squeeze(ps) t = Add(p, n) r = Range(p, t, one) rows = Unsqueeze(r, first)"""
GIVEN = {
    "zero": np.int64(0),
    "column_shape": np.array([1, -1, 1]),
    "one": np.int64(1),
    "first": np.array([0]),
    "table": np.ones((9, 4), np.float32),
}


def counting(body: str, extra: str = "", **given: Any) -> ir.Model:
    inputs = f"int64[b, s] input_ids, float[b, 2, p, 4] past{extra}"
    return graph(f"g ({inputs}) => (float[b, s, 4] y) {{ {COUNTED} {body} }}", **(GIVEN | given))


def inputs(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.inputs]


def test_table_rows_are_indexed_by_the_input() -> None:
    model = counting("y = Gather(table, rows)")
    apply(PositionIdsPass(), model)
    assert inputs(model) == ["input_ids", "past", "position_ids"]
    assert [[str(v.name) for v in node.inputs if v] for node in model.graph] == [["table", "position_ids"]]


def test_angles_are_computed_from_the_input() -> None:
    model = counting("f = Cast <to = 1> (rows) y = Cos(f)")
    apply(PositionIdsPass(), model)
    assert [node.op_type for node in model.graph] == ["Cast", "Cos"]


def test_a_constant_that_is_added_stays_added() -> None:
    model = counting("other = Add(rows, one) y = Gather(table, other)")
    apply(PositionIdsPass(), model)
    assert inputs(model) == ["input_ids", "past", "position_ids"]
    assert [node.op_type for node in model.graph] == ["Add", "Gather"]
    feed = {"input_ids": np.zeros((2, 3), np.int64), "past": np.zeros((2, 2, 0, 4), np.float32)}
    rows = np.arange(36, dtype=np.float32).reshape(9, 4)
    expected = np.array([[[1], [2], [3]], [[5], [6], [7]]]) * 4 + np.arange(4)
    changed = counting("other = Add(rows, one) y = Gather(table, other)", table=rows)
    apply(PositionIdsPass(), changed)
    (found,) = evaluate(changed, {**feed, "position_ids": np.array([[0, 1, 2], [4, 5, 6]])})
    np.testing.assert_array_equal(found, expected)


def test_flat_positions_whose_rows_are_reshaped_read_the_input_too() -> None:
    body = """two = Add(rows, one) flat = Reshape(two, minus) found = Gather(table, flat)
        y = Reshape(found, whole)"""
    model = counting(body, minus=np.array([-1]), whole=np.array([1, -1, 4]))
    apply(PositionIdsPass(), model)
    assert [node.op_type for node in model.graph] == ["Add", "Gather"]
    assert inputs(model) == ["input_ids", "past", "position_ids"]


def test_flat_positions_with_another_use_stay() -> None:
    body = """flat = Reshape(rows, minus) found = Gather(table, flat) z = Neg(found)
        w = Reshape(found, whole) y = Add(w, z)"""
    model = counting(body, minus=np.array([-1]), whole=np.array([1, -1, 4]))
    apply(PositionIdsPass(), model)
    assert inputs(model) == ["input_ids", "past"]


@pytest.mark.parametrize(
    "body", ["other = Mul(rows, two) y = Gather(table, other)", "y = Gather(table, wrong)"]
)
def test_other_counts_are_not_positions(body: str) -> None:
    model = counting(body, two=np.int64(2), wrong=np.array([[0, 1]]))
    apply(PositionIdsPass(), model)
    assert inputs(model) == ["input_ids", "past"]


def test_a_graph_with_positions_stays_as_it_is() -> None:
    model = counting("y = Gather(table, rows)", ", int64[b, s] position_ids")
    apply(PositionIdsPass(), model)
    assert "Range" in {node.op_type for node in model.graph}


def test_positions_on_another_axis_keep_it() -> None:
    model = counting("column = Reshape(r, column_shape) f = Cast <to = 1> (column) y = Cos(f)")
    apply(PositionIdsPass(), model)
    assert [node.op_type for node in model.graph] == ["Unsqueeze", "Cast", "Cos"]
    axes = next(iter(model.graph)).inputs[1]
    assert axes is not None
    assert axes.const_value is not None
    assert axes.const_value.numpy().tolist() == [2]


def test_a_graph_without_a_cache_counts_from_zero() -> None:
    body = """s = Shape <start = 1, end = 2> (input_ids) n = Squeeze(s) r = Range(zero, n, one)
        rows = Unsqueeze(r, first) y = Gather(table, rows)"""
    model = graph(f"g (int64[b, s] input_ids) => (float[b, s, 4] y) {{ {body} }}", **GIVEN)
    apply(PositionIdsPass(), model)
    assert inputs(model) == ["input_ids", "position_ids"]


def test_what_is_made_of_one_row_of_positions_has_the_rows_of_the_batch() -> None:
    """As in traces of CodeGen, whose angles are repeated by a Reshape to [1, tokens, 1, width, 1]."""
    body = """found = Gather(table, rows) a, c = Split <axis = -1, num_outputs = 2> (found)
        wide = Reshape(a, repeated) both = Concat <axis = -1> (wide, wide) flat = Reshape(both, joined)
        c1 = Concat <axis = -1> (c, c) y = Add(flat, c1)"""
    table = np.arange(36, dtype=np.float32).reshape(9, 4)
    shapes: dict[str, Any] = {"repeated": np.array([1, 0, 2, 1]), "joined": np.array([1, 0, 4])}
    feed = {"input_ids": np.zeros((2, 3), np.int64), "past": np.zeros((2, 2, 0, 4), np.float32)}
    (alone,) = evaluate(counting(body, table=table, **shapes), feed)  # a row for both
    model = counting(body, table=table, **shapes)
    apply(PositionIdsPass(), model)
    positions = np.array([[0, 1, 2], [4, 5, 6]])
    (found,) = evaluate(model, {**feed, "position_ids": positions})
    np.testing.assert_array_equal(found[:1], alone)
    np.testing.assert_array_equal(found[1], alone[0] + 8 * 4)  # each row of the table is 4 above the last
