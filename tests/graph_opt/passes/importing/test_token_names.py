from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.passes.importing.token_names import TokenNamesPass

GIVEN = {"embed": np.zeros((9, 4), np.float32), "head": np.zeros((4, 9), np.float32)}


def names(text: str) -> list[str | None]:
    model = graph(text, **GIVEN)
    assert apply(TokenNamesPass(), model) == []
    return [value.name for value in [*model.graph.inputs, *model.graph.outputs]]


def test_tokens_and_scores_get_their_names() -> None:
    body = "x = Gather(embed, input_1) linear_14 = MatMul(x, head)"
    text = f"g (int64[b, s] input_1) => (float[b, s, 9] linear_14) {{ {body} }}"
    assert names(text) == ["input_ids", "logits"]


@pytest.mark.parametrize(
    "text",
    [
        "g (int64[b, s] i) => (float[b, s, 4] y) { y = Gather(embed, i) }",
        "g (int64[s] i) => (float[s, 9] y) { x = Gather(embed, i) y = MatMul(x, head) }",
        """g (int64[b, s] i, int64[b, s] j) => (float[b, s, 9] y) {
            x = Gather(embed, i) z = Gather(embed, j) w = Add(x, z) y = MatMul(w, head) }""",
        """g (int64[b, s] i, float[b, s] input_ids) => (float[b, s, 9] y, float[b, s] z) {
            x = Gather(embed, i) y = MatMul(x, head) z = Exp(input_ids) }""",
    ],
    ids=["features", "no rows", "two inputs", "a name that is taken"],
)
def test_other_graphs_keep_theirs(text: str) -> None:
    model = graph(text, **GIVEN)
    assert names(text) == [value.name for value in [*model.graph.inputs, *model.graph.outputs]]


def test_inner_values_are_renamed() -> None:
    body = "logits = Gather(embed, tokens) input_ids = Neg(logits) scores = MatMul(input_ids, head)"
    model = graph(f"g (int64[b, s] tokens) => (float[b, s, 9] scores) {{ {body} }}", **GIVEN)
    assert apply(TokenNamesPass(), model) == []
    made = [str(value.name) for node in model.graph for value in node.outputs]
    assert model.graph.inputs[0].name == "input_ids"
    assert made[-1] == "logits"
    assert len({*made, "input_ids"}) == 4
