from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.passes.cleanup.drop_guards import DropGuardsPass

GIVEN = {
    "table": np.ones((9, 4), np.float32), "zero": np.float32(0), "one": np.float32(1), "two": np.float32(2),
    "first": np.int64(0), "step": np.int64(1), "i1": np.array([1]), "i12": np.array([1, 2]),
    "row": np.array([-1]), "last": np.array([2]), "none": np.int64(0),
}  # fmt: skip
ORDER = """s1 = Shape <start = 1> (input_ids) s = Squeeze(s1) keys = Range(first, s, step)
    queries = Unsqueeze(keys, i1) order = LessOrEqual(keys, queries) real0 = Cast <to = 9> (attention_mask)
    real = Unsqueeze(real0, i12) seen = And(order, real) ones = Cast <to = 1> (seen)"""
COUNT = "sums = ReduceSum(ones, row) count = Squeeze(sums, i1)"


def guarded(condition: str, where: str) -> ir.Model:
    body = f"x0 = Gather(table, input_ids) x = Sigmoid(x0) {ORDER} {COUNT} {condition} {where}"
    text = f"""g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s, 4] logits)
        <float[b, s, 4] x, float[b, s, 4] y> {{ {body} logits = Tanh(y) }}"""
    return graph(text, **GIVEN)


@pytest.mark.parametrize(
    ("condition", "where"),
    [
        ("empty = Less(count, one)", "y = Where(empty, zero, x)"),
        ("some = GreaterOrEqual(count, one)", "y = Where(some, x, zero)"),
    ],
)
def test_a_guard_of_fully_masked_rows_is_removed(condition: str, where: str) -> None:
    model = guarded(condition, where)
    assert apply(DropGuardsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["Gather", "Sigmoid", "Tanh"]


@pytest.mark.parametrize(
    ("condition", "where"),
    [
        ("empty = Less(count, two)", "y = Where(empty, zero, x)"),
        ("empty = Less(count, one)", "y = Where(empty, one, x)"),
        ("empty = Less(x, zero)", "y = Where(empty, zero, x)"),
        ("odd = Equal(input_ids, none) empty = Unsqueeze(odd, last)", "y = Where(empty, x, zero)"),
    ],
    ids=["rows that see one token", "no zero", "a condition on features", "a condition on tokens"],
)
def test_conditions_that_can_hold_stay(condition: str, where: str) -> None:
    model = guarded(condition, where)
    apply(DropGuardsPass(), model)
    assert "Where" in {node.op_type for node in model.graph}


def test_a_condition_on_pairs_of_tokens_without_rows_stays() -> None:
    body = f"""x = Gather(table, input_ids) xt = Transpose <perm = [0, 2, 1]> (x) scores = MatMul(x, xt)
        {ORDER} later = Not(order) seen_scores = Where(later, zero, scores) logits = MatMul(seen_scores, x)"""
    text = f"""g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s, 4] logits)
        <float[b, s, s] scores, float[b, s, s] seen_scores> {{ {body} }}"""
    model = graph(text, **GIVEN)
    assert apply(DropGuardsPass(), model) == []
    assert "Where" in {node.op_type for node in model.graph}
