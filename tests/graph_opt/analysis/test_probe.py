from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.analysis.constant_evaluation import is_known
from carryall.graph_opt.analysis.probe import (
    MaskMeaning,
    Probe,
    contract_feed,
    mask_meaning,
    rope_table,
    turns_alone,
)

CONTEXT = 64
INPUTS = "int64[B, S] input_ids, int64[B, T] attention_mask, float[B, 2, P, 8] past"
HEAD = """
    shape = Shape <start = 1> (input_ids) s = Squeeze(shape)
    past_shape = Shape <start = 2, end = 3> (past) p = Squeeze(past_shape) t = Add(p, s)
    keys = Range(zero, t, one) rows = Range(p, t, one) queries = Unsqueeze(rows, axis1)"""
TAIL = """
    real0 = Cast <to = 9> (attention_mask) real = Unsqueeze(real0, axes12)
    seen = And(visible, real) mask = Where(seen, free, hidden)"""
CONSTANTS = {
    "zero": np.int64(0),
    "one": np.int64(1),
    "axis1": np.array([1]),
    "axes12": np.array([1, 2]),
    "free": np.float32(0),
    "hidden": np.float32(-3e38),
    "infinite": np.float32(-np.inf),
    "window": np.int64(5),
    "bias": np.float32(0.5),
    "slopes": np.array([0.5, 0.125], np.float32).reshape(1, 2, 1, 1),
}


def mask(body: str, tail: str = TAIL) -> ir.Model:
    inputs = INPUTS.replace(" past", " past_key_values_0_key")
    text = f"g ({inputs}) => (float[B, 1, S, T] mask) {{ {HEAD} {body} {tail} }}"
    model = graph(text.replace("(past)", "(past_key_values_0_key)"), **CONSTANTS)
    model.graph.inputs[-1].name = "past_key_values.0.key"
    return model


def meaning(model: ir.Model, context: int = CONTEXT) -> MaskMeaning | str:
    return mask_meaning(model.graph, model.graph.outputs[0], context)


def test_causal() -> None:
    assert meaning(mask("visible = LessOrEqual(keys, queries)")) == MaskMeaning()


def test_causal_written_with_triu() -> None:
    """Another form of the same values."""
    body = """size = Unsqueeze(t, axis0) square = Concat <axis = 0> (size, size)
        ones = ConstantOfShape <value = float[1] {1.0}> (square) start = Add(p, one)
        lower = Trilu <upper = 0> (ones)
        p1 = Unsqueeze(p, axis0) t1 = Unsqueeze(t, axis0) rows2 = Slice(lower, p1, t1, axis0)
        visible = Cast <to = 9> (rows2)"""
    model = mask(body.replace("start = Add(p, one)", ""), TAIL)
    model.graph.register_initializer(ir.val("axis0", const_value=ir.tensor(np.array([0]), name="axis0")))
    axis0 = model.graph.initializers["axis0"]
    for node in model.graph:
        for index, operand in enumerate(node.inputs):
            if operand is not None and operand.name == "axis0" and operand is not axis0:
                node.replace_input_with(index, axis0)
    assert meaning(model) == MaskMeaning()


WINDOW = "near = LessOrEqual(keys, queries) oldest = Sub(queries, window) young = Greater(keys, oldest)"


def test_sliding_window() -> None:
    assert meaning(mask(f"{WINDOW} visible = And(near, young)")) == MaskMeaning(window=5)


AHEAD = """wide = Cast <to = 7> (input_ids) columns = Unsqueeze(wide, axes13) further = Add(queries, columns)
    last = LessOrEqual(keys, further) behind = Greater(keys, queries) picture = And(last, behind)"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            f"{WINDOW} near2 = And(near, young) {AHEAD} visible = Or(near2, picture)",
            MaskMeaning(5, ahead=True),
        ),
        (f"near = LessOrEqual(keys, queries) {AHEAD} visible = Or(near, picture)", MaskMeaning(ahead=True)),
        (f"near = LessOrEqual(keys, queries) {AHEAD} visible = Or(near, last)", MaskMeaning(ahead=True)),
        (f"near = LessOrEqual(keys, queries) {AHEAD} visible = Or(near, behind)", "neither causal nor"),
        (f"near = LessOrEqual(keys, queries) {AHEAD} visible = And(near, last)", "neither causal nor"),
    ],
)
def test_keys_ahead_are_those_that_an_input_counts(body: str, expected: MaskMeaning | str) -> None:
    model = mask(body)
    axes = ir.val("axes13", const_value=ir.tensor(np.array([1, 3]), name="axes13"))
    ahead = ir.val("image_ahead", ir.DataType.INT64, ["B", "S"])
    model.graph.register_initializer(axes)
    model.graph.inputs.append(ahead)
    for node in model.graph:
        if node.outputs[0].name == "wide":
            node.replace_input_with(0, ahead)
        if node.outputs[0].name == "columns":
            node.replace_input_with(1, axes)
    found = mask_meaning(model.graph, model.graph.outputs[0], CONTEXT, ahead=True)
    assert found == expected or (isinstance(expected, str) and expected in str(found))
    if not isinstance(expected, str):
        assert meaning(model) == "the mask depends on ['image_ahead']"


def test_a_window_longer_than_the_context_is_none() -> None:
    assert meaning(mask(f"{WINDOW} visible = And(near, young)"), context=5) == MaskMeaning()


def test_bidirectional_attention_is_refused() -> None:
    """Every key is visible, so only the last row looks causal."""
    body = "ge = GreaterOrEqual(queries, zero) all = GreaterOrEqual(keys, zero) visible = And(ge, all)"
    assert "neither causal nor a sliding window" in str(meaning(mask(body)))


def test_a_mask_that_ignores_padding_is_refused() -> None:
    tail = """u = Unsqueeze(visible, axes01) seen = Where(u, free, hidden)
              zeros0 = Cast <to = 1> (attention_mask) zeros1 = Mul(zeros0, free)
              zeros = Unsqueeze(zeros1, axes12) mask = Add(seen, zeros)"""
    body = "visible = LessOrEqual(keys, queries)"
    model = mask(body, tail.replace("u = Unsqueeze(visible, axes01) ", "").replace("(u,", "(visible,"))
    assert "neither causal nor a sliding window" in str(meaning(model))


def test_a_bias_on_visible_keys_is_refused() -> None:
    """ALiBi has such a bias."""
    tail = TAIL.replace("mask = Where(seen, free, hidden)", "mask = Where(seen, bias, hidden)")
    assert (
        meaning(mask("visible = LessOrEqual(keys, queries)", tail)) == "the mask adds a bias to visible keys"
    )


SLOPED = TAIL.replace("mask = Where(seen, free, hidden)", "BIAS mask = Where(seen, sloped, hidden)")


@pytest.mark.parametrize("columns", ["keys", "distance"])
def test_slopes_of_heads_times_positions_or_distances_are_alibi(columns: str) -> None:
    bias = f"distance = Sub(keys, queries) c = Cast <to = 1> ({columns}) sloped = Mul(c, slopes)"
    model = mask(f"{WINDOW} visible = And(near, young)", SLOPED.replace("BIAS", bias))
    found = mask_meaning(model.graph, model.graph.outputs[0], CONTEXT, heads=2)
    assert found == MaskMeaning(window=5, slopes=(0.5, 0.125))
    assert (
        meaning(model) == "the mask has shape (1, 2, 1, 64) instead of (1, 1, 1, 64) (one mask for all heads)"
    )


def test_keys_that_alibi_hides_by_minus_infinity() -> None:
    """The difference of two of these is NaN."""
    bias = "c = Cast <to = 1> (keys) sloped = Mul(c, slopes)"
    tail = SLOPED.replace("BIAS", bias).replace("hidden)", "infinite)")
    model = mask("visible = LessOrEqual(keys, queries)", tail)
    found = mask_meaning(model.graph, model.graph.outputs[0], CONTEXT, heads=2)
    assert found == MaskMeaning(slopes=(0.5, 0.125))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("limit", ["zero", "queries"], ids=["all keys", "the own key"])
def test_masks_that_hide_all_keys_or_the_own_one_are_refused(limit: str, heads: int) -> None:
    body = f"near = LessOrEqual(keys, queries) before = Less(keys, {limit}) visible = And(near, before)"
    model = mask(body, TAIL.replace("free, hidden)", "free, infinite)"))
    found = mask_meaning(model.graph, model.graph.outputs[0], CONTEXT, heads=heads)
    assert "neither causal nor a sliding window" in str(found)


def test_a_bias_that_is_not_proportional_to_the_distance_is_refused() -> None:
    bias = "c = Cast <to = 1> (keys) root = Sqrt(c) sloped = Mul(root, slopes)"
    model = mask("visible = LessOrEqual(keys, queries)", SLOPED.replace("BIAS", bias))
    found = mask_meaning(model.graph, model.graph.outputs[0], CONTEXT, heads=2)
    assert found == "the mask adds a bias to visible keys"


def test_a_mask_from_an_unknown_input_is_refused() -> None:
    model = graph("g (float[B, 1, S, T] prefix) => (float[B, 1, S, T] mask) { mask = Identity(prefix) }")
    assert meaning(model) == "the mask depends on ['prefix']"


ROPE = """g (int64[B, S] position_ids, float[B] other) => (float[B, S, 2] cos) {
    p0 = Cast <to = 1> (position_ids) p = Unsqueeze(p0, last)
    angle = Mul(p, frequencies) cos = Cos(angle) }"""


def test_a_rope_table_is_the_formula_at_every_position() -> None:
    frequencies = np.array([1.0, 0.1], np.float32)
    model = graph(ROPE, last=np.array([-1]), frequencies=frequencies)
    table = rope_table(model.graph, model.graph.outputs[0], 7)
    np.testing.assert_allclose(table, np.cos(np.arange(7)[:, None] * frequencies), atol=1e-6)
    assert table.dtype == np.float32


@pytest.mark.parametrize(
    ("rest", "alone"),
    [
        ("cos = Cos(angle)", True),
        (
            "most = ReduceMax(p0) limit = Div(most, last_float) scaled = Mul(angle, limit) cos = Cos(scaled)",
            False,
        ),
        ("c = Cos(angle) cos = Mul(c, other)", False),
    ],
    ids=["plain", "dynamic", "another input"],
)
def test_angles_of_a_token_alone_are_known_by_evaluation(rest: str, alone: bool) -> None:
    frequencies = np.array([1.0, 0.1], np.float32)
    model = graph(
        ROPE.replace("cos = Cos(angle)", rest),
        last=np.array([-1]),
        frequencies=frequencies,
        last_float=np.array(100, np.float32),
    )
    assert turns_alone(model.graph, model.graph.outputs[0], 200) == alone


def test_a_table_that_is_too_short_turns_no_token_alone() -> None:
    text = "g (int64[B, S] position_ids) => (float[B, S, 2] cos) { cos = Gather(table, position_ids) }"
    model = graph(text, table=np.ones((5, 2), np.float32))
    assert not turns_alone(model.graph, model.graph.outputs[0], 6)


def test_a_rope_that_needs_more_than_positions_is_an_error() -> None:
    text = ROPE.replace("cos = Cos(angle)", "c = Cos(angle) cos = Mul(c, other)")
    model = graph(text, last=np.array([-1]), frequencies=np.array([1.0, 0.1], np.float32))
    with pytest.raises(GraphError, match=r"depends on \['other', 'position_ids'\]"):
        rope_table(model.graph, model.graph.outputs[0], 7)


def test_a_stored_table_that_is_too_short_is_an_error() -> None:
    text = "g (int64[B, S] position_ids) => (float[B, S, 2] cos) { cos = Gather(table, position_ids) }"
    model = graph(text, table=np.ones((5, 2), np.float32))
    assert rope_table(model.graph, model.graph.outputs[0], 5).shape == (5, 2)
    with pytest.raises(GraphError, match=r"cannot be computed for 6 positions; .* choose a context length"):
        rope_table(model.graph, model.graph.outputs[0], 6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "bloom", "qwen2_vl"])
def test_values_are_those_of_the_reference_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """NumPy computes masks and tables of decoders, bit for bit."""
    model = export_model(write_tiny(family, tmp_path / "checkpoint"))
    values = {
        value
        for node in model.graph
        for value in (node.inputs[3:4] if node.op_type == "Attention" else node.inputs[1:3])
        if node.op_type in ("Attention", "RotaryEmbedding") and value is not None
    }
    assert values
    for value in values:
        probe, reference = Probe(model.graph, value), Probe(model.graph, value)
        monkeypatch.setattr(reference, "_computed", lambda _: None)
        feed = contract_feed(probe.inputs, past=5, new=3)
        found = probe(feed)
        expected = reference(feed)
        assert (probe._evaluator is None) == all(map(is_known_or_angle, producers(value)))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def is_known_or_angle(node: ir.Node) -> bool:
    return is_known(node) or node.op_type in ("Cos", "Sin")


def producers(value: ir.Value) -> set[ir.Node]:
    found, stack = set[ir.Node](), [value]
    while stack:
        node = stack.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(operand for operand in node.inputs if operand is not None)
    return found
