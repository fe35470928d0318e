"""Operators with states: carryall's for flat batches, onnxruntime's for explicit states, or a refusal."""

from __future__ import annotations

import re

import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.errors import UnsupportedAttentionError
from carryall.graph_opt.lower.attention.recurrent_states import (
    MicrosoftStatesPass,
    NativeStatesPass,
    RefuseStatesPass,
)

GATED = 'update_rule = "gated_delta", q_num_heads = 2, kv_num_heads = 2, scale = 0.5'
INPUTS = "float[b, s, 8] q, float[b, s, 32] v, float[b, s, 2] d, float[b, s, 2] e"
STATE = "float[b, 2, 4, 16] past_recurrent_0"
TILES = "float[places, 2, 8, 16] past_recurrent_0"
ROWS = "int32[rows_and_one] cumulative_sequence_length"
PLACES = "int32[rows] state_places"
SIZES = "layout = 2, heads = 2, key_heads = 2, key_size = 4, value_size = 16, scale = 0.5, bfloat16 = 0"


def parsed(text: str) -> ir.Model:
    """A graph whose states have their names, which the syntax of graphs cannot express."""
    model = graph(text)
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.name = re.sub(r"_(conv|recurrent)_0$", r"_\1.0", str(value.name))
    return model


def test_linear_attention_reads_and_writes_the_states_of_its_rows() -> None:
    model = parsed(
        f"g ({INPUTS}, {STATE}, {ROWS}) => (float[b, s, 32] y, float[b, 2, 4, 16] present_recurrent_0) "
        f"{{ y, present_recurrent_0 = LinearAttention <{GATED}> (q, q, v, past_recurrent_0, d, e) }}"
    )
    assert apply(NativeStatesPass(), model) == []
    call = f"carryall.DeltaRule <{SIZES}>"
    arguments = "(q, q, v, d, e, past_recurrent_0, cumulative_sequence_length, state_places)"
    assert_same(
        model,
        parsed(
            f"g ({INPUTS}, {TILES}, {ROWS}, {PLACES}) => (float[b, s, 32] y) {{ y = {call} {arguments} }}"
        ),
    )


def test_a_convolution_needs_no_transposes_and_a_product_with_the_mask_goes() -> None:
    weights = "<float[3, 1, 2] w = {1, 2, 3, 4, 5, 6}, int64[1] axis = {-1}>"
    mask = "float[b, s, 3] x, int64[b, s] attention_mask"
    model = parsed(
        f"g ({mask}, float[b, 3, 1] past_conv_0, {ROWS}) "
        "=> (float[b, s, 3] y, float[b, 3, 1] present_conv_0) "
        f"{weights} {{ f = Cast <to = 1> (attention_mask) u = Unsqueeze (f, axis) r = Mul (x, u) "
        "t = Transpose <perm = [0, 2, 1]> (r) "
        'c, present_conv_0 = CausalConvWithState <activation = "silu"> (t, w, , past_conv_0) '
        "y = Transpose <perm = [0, 2, 1]> (c) }"
    )
    assert apply(NativeStatesPass(), model) == []
    call = "carryall.ShortConvolution <layout = 2, silu = 1>"
    assert_same(
        model,
        parsed(
            f"g ({mask}, float[places, 1, 3] past_conv_0, {ROWS}, {PLACES}) => (float[b, s, 3] y) "
            "<float[2, 3] w_by_tap = {1, 3, 5, 2, 4, 6}> "
            f"{{ y = {call} (x, w_by_tap, , past_conv_0, cumulative_sequence_length, state_places) }}"
        ),
    )


@pytest.mark.parametrize(
    ("attributes", "state", "rows", "reason"),
    [
        (GATED, "float[b, 2, 4, 6]", ROWS, "6 values, which is no multiple of 16"),
        (GATED.replace("gated_delta", "linear"), "float[b, 2, 4, 16]", ROWS, "update rule linear"),
        (GATED.replace("q_num_heads = 2", "q_num_heads = 1"), "float[b, 2, 4, 16]", ROWS, "other heads"),
        (GATED, "float[b, 2, 4, 16]", "int64[n] other", "the graph has none"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(
    attributes: str, state: str, rows: str, reason: str
) -> None:
    model = parsed(
        f"g ({INPUTS}, {state} past_recurrent_0, {rows}) => (float[b, s, 32] y, {state} present_recurrent_0) "
        f"{{ y, present_recurrent_0 = LinearAttention <{attributes}> (q, q, v, past_recurrent_0, d, e) }}"
    )
    with pytest.raises(UnsupportedAttentionError, match=reason):
        NativeStatesPass()(model)


def test_explicit_states_are_computed_by_onnxruntimes_operators() -> None:
    text = (
        f"g ({INPUTS}, {STATE}) => (float[b, s, 32] y, float[b, 2, 4, 16] present_recurrent_0) "
        f"{{ y, present_recurrent_0 = NAME <{GATED}> (q, q, v, past_recurrent_0, d, e) }}"
    )
    model = parsed(text.replace("NAME", "LinearAttention"))
    assert apply(MicrosoftStatesPass(), model) == []
    assert_same(model, parsed(text.replace("NAME", "com.microsoft.LinearAttention")))


def test_a_target_without_states_names_the_first() -> None:
    model = parsed(f"g ({STATE}) => (float[b, 2, 4, 16] y) {{ y = Identity (past_recurrent_0) }}")
    with pytest.raises(UnsupportedAttentionError, match=r"past_recurrent\.0 and others"):
        RefuseStatesPass()(model)
