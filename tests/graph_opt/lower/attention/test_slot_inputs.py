from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import evaluate, graph

from carryall.errors import GraphError
from carryall.graph_opt.lower.attention.slot_inputs import SlotInputsPass

LENGTHS = "int32[B] seqlens_k, int32 total_sequence_length"


@pytest.mark.parametrize(
    ("sequence", "seqlens_k", "total", "expected"),
    [
        (1, [4, 0, 7], 8, [[4], [0], [7]]),
        (3, [7], 8, [[5, 6, 7]]),
        (3, [2, 0], 3, [[0, 1, 2], [0, 1, 2]]),
        (1, [0], 1, [[0]]),
    ],
    ids=["ragged decode", "tokens on top of a cache", "fresh prompts, padded on the right", "a first token"],
)
def test_positions_follow_from_the_cache_lengths(
    sequence: int, seqlens_k: list[int], total: int, expected: list[list[int]]
) -> None:
    inputs = f"int64[B, S] input_ids, int64[B, S] position_ids, {LENGTHS}"
    model = graph(f"g ({inputs}) => (int64[B, S] y) {{ y = Add(input_ids, position_ids) }}")
    SlotInputsPass()(model)
    feed = {
        "input_ids": np.zeros((len(seqlens_k), sequence), np.int64),
        "seqlens_k": np.array(seqlens_k, np.int32),
        "total_sequence_length": np.array(total, np.int32),
    }
    assert {value.name for value in model.graph.inputs} == set(feed)
    (positions,) = evaluate(model, feed)
    np.testing.assert_array_equal(positions, expected)


def test_masks_are_removed_and_caches_have_a_fixed_length() -> None:
    inputs = f"int64[B, S] input_ids, int64[B, T] attention_mask, float[B, 2, P, 8] cache, {LENGTHS}"
    model = graph(f"g ({inputs}) => (float[B, 2, T, 8] present) {{ present = Identity(cache) }}")
    model.graph.inputs[2].name = "past_key_values.0.key"
    model.graph.outputs[0].name = "present.0.key"
    model.graph.node(0).op_type = "GroupQueryAttention"
    SlotInputsPass()(model)
    assert "attention_mask" not in {value.name for value in model.graph.inputs}
    for value in (model.graph.inputs[1], model.graph.outputs[0]):
        assert str(value.shape) == "[B,2,max_length,8]"


def test_a_mask_that_is_still_read_is_an_error() -> None:
    text = f"g (int64[B, T] attention_mask, {LENGTHS}) => (int64[B, T] y) {{ y = Neg(attention_mask) }}"
    with pytest.raises(GraphError, match=r"Neg .* reads attention_mask"):
        SlotInputsPass()(graph(text))


def test_an_attention_that_was_not_lowered_is_an_error() -> None:
    text = "g (float[B, 2, S, 8] x) => (float[B, 2, S, 8] y) { y = Attention(x, x, x) }"
    with pytest.raises(GraphError, match="was not lowered to GroupQueryAttention"):
        SlotInputsPass()(graph(text))


def test_positions_that_are_read_may_stay_an_input() -> None:
    text = "g (int64[B, S] input_ids, int64[B, S] position_ids) => (int64[B, S] y) {{ y = {} }}"
    for body, kept in (("Add(input_ids, position_ids)", True), ("Neg(input_ids)", False)):
        model = graph(text.format(body))
        SlotInputsPass(position_inputs=True)(model)
        assert ("position_ids" in {value.name for value in model.graph.inputs}) == kept


def test_attention_without_a_cache_is_an_error() -> None:
    attention = "com.microsoft.GroupQueryAttention<num_heads: int = 1, kv_num_heads: int = 1>"
    call = f"{attention}(x, x, x, , , seqlens_k, total_sequence_length)"
    text = f"g (float[B, S, 16] x, {LENGTHS}) => (float[B, S, 16] y) {{ y = {call} }}"
    with pytest.raises(GraphError, match="has no KV cache"):
        SlotInputsPass()(graph(text))
