from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, evaluate, graph
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.analysis.probe import MaskMeaning, Probe, mask_meaning
from carryall.graph_opt.passes.normalize.canonical_mask import CanonicalMaskPass

LOW = np.finfo(np.float32).min
HEAD = """x = Gather(embed, input_ids) shape = Shape <start = 1> (input_ids) s = Squeeze(shape)
    past_shape = Shape <start = 2, end = 3> (past_key) p = Squeeze(past_shape) t = Add(p, s)
    keys = Range(zero, t, one) r = Range(p, t, one) queries = Unsqueeze(r, i1)"""
PADDING = "real0 = Cast <to = 9> (attention_mask) real = Unsqueeze(real0, i12)"
CAUSAL = "order = LessOrEqual(keys, queries)"
GIVEN = {
    "embed": np.random.default_rng(0).standard_normal((9, 8)).astype(np.float32),
    "zero": np.int64(0), "one": np.int64(1), "i1": np.array([1]), "i12": np.array([1, 2]),
    "free": np.float32(0), "low": np.float32(LOW), "window": np.int64(3), "slope": np.float32(0.5),
}  # fmt: skip


def decoder(body: str, mask: str, attributes: str = "", padding: bool = True) -> ir.Model:
    inputs = "int64[b, s] input_ids, " + ("int64[b, t] attention_mask, " if padding else "")
    inputs += "float[b, 1, p, 8] past_key, float[b, 1, p, 8] past_value"
    attention = f"""logits, pk, pv = Attention <q_num_heads = 1, kv_num_heads = 1{attributes}>
        (x, x, x, {mask}, past_key, past_value)"""
    outputs = "float[b, s, 8] logits, float[b, 1, t, 8] pk, float[b, 1, t, 8] pv"
    types = "<bool[b, 1, s, t] seen, float[b, 1, s, t] added>"
    model = graph(f"g ({inputs}) => ({outputs}) {types} {{ {HEAD} {body} {attention} }}", **GIVEN)
    for value, kind in zip(model.graph.inputs[-2:], ("key", "value"), strict=True):
        value.name = f"past_key_values.0.{kind}"
    return model


def meaning(model: ir.Model) -> MaskMeaning | str:
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert "is_causal" not in node.attributes
    assert node.inputs[3] is not None
    return mask_meaning(model.graph, node.inputs[3], 32)


WINDOW = f"{PADDING} {CAUSAL} old = Sub(queries, window) near = Greater(keys, old) o2 = And(order, near)"


@pytest.mark.parametrize(
    ("body", "mask", "attributes", "padding", "window"),
    [
        (
            f"{PADDING} every = GreaterOrEqual(queries, zero) seen = And(every, real)",
            "seen",
            ", is_causal = 1",
            True,
            None,
        ),
        (f"{PADDING} {CAUSAL} seen = And(order, real)", "seen", "", True, None),
        (
            f"{PADDING} {CAUSAL} both = And(order, real) added = Where(both, free, low)",
            "added",
            "",
            True,
            None,
        ),
        (f"{WINDOW} both = And(o2, real) added = Where(both, free, low)", "added", "", True, 3),
        ("", "", ", is_causal = 1", True, None),
        (f"{CAUSAL} added = Where(order, free, low)", "added", "", False, None),
        ("", "", ", is_causal = 1", False, None),
    ],
    ids=[
        "attribute and padding",
        "bool",
        "additive",
        "window",
        "attribute",
        "without padding",
        "attribute alone",
    ],
)
def test_every_form_becomes_canonical_mask(
    body: str, mask: str, attributes: str, padding: bool, window: int | None
) -> None:
    model = decoder(body, mask, attributes, padding)
    assert apply(CanonicalMaskPass(), model) == []
    assert meaning(model) == MaskMeaning(window)
    assert "attention_mask" in {value.name for value in model.graph.inputs}
    rng = np.random.default_rng(0)
    feed = {"input_ids": rng.integers(0, 9, (2, 4)), "attention_mask": np.ones((2, 7), np.int64)}
    for kind in ("key", "value"):
        feed[f"past_key_values.0.{kind}"] = rng.standard_normal((2, 1, 3, 8)).astype(np.float32)
    before = decoder(body, mask, attributes, padding)
    given = {str(value.name): feed[str(value.name)] for value in before.graph.inputs}
    for found, wanted in zip(evaluate(model, feed), evaluate(before, given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_bias_on_what_is_seen_stays_and_says_so() -> None:
    body = f"{PADDING} {CAUSAL} both = And(order, real) added = Where(both, slope, low)"
    model = decoder(body, "added")
    assert apply(CanonicalMaskPass(), model) == ["the mask adds a bias to visible keys"]
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert node.inputs[3] is not None
    assert node.inputs[3].name == "added"


def test_a_mask_that_is_written_the_one_way_stays() -> None:
    model = decoder("", "", ", is_causal = 1")
    apply(CanonicalMaskPass(), model)
    again = CanonicalMaskPass()
    assert apply(again, model) == []
    assert again.fired == 0


def test_masks_of_our_own_exporter_are_written_the_one_way(tmp_path: Path) -> None:
    write_tiny("gemma3_text", tmp_path)
    written = CanonicalMaskPass()
    assert apply(written, export_model(tmp_path)) == []
    assert written.fired == 0


def test_is_causal_intersects_with_a_mask_of_one_row() -> None:
    """As the operator's text says; neither ONNX's reference implementation nor onnxruntime computes it."""
    model = decoder(f"{PADDING} seen = Identity(real)", "seen", ", is_causal = 1")
    apply(CanonicalMaskPass(), model)
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert node.inputs[3] is not None
    mask = Probe(model.graph, node.inputs[3])
    padding, past, new = np.array([0, 2]), 3, 4
    feed: dict[str, npt.NDArray[Any]] = {
        "attention_mask": (np.arange(past + new) >= padding[:, None]).astype(np.int64),
        "input_ids": np.zeros((2, new), np.int64),
        "past_key_values.0.key": np.zeros((2, 1, past, 8), np.float32),
    }
    query, key = past + np.arange(new)[:, None], np.arange(past + new)[None]
    expected = (key <= query) & (key >= padding[:, None, None])
    np.testing.assert_array_equal(mask(feed)[:, 0] == 0, expected)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("where", ["past", "longer keys", "nonpad_kv_seqlen"])
def test_where_the_diagonal_of_is_causal_lies(opset: int, where: str) -> None:
    """Query i sees key j <= past + i; keys beyond the queries without a past count as later, not earlier."""
    if where == "nonpad_kv_seqlen" and opset < 24:
        pytest.skip("an operand of opset 24")
    new, total = 3, 7
    keys = 3 if where == "past" else total
    inputs = f"float[1, 1, {new}, 4] q, float[1, 1, {keys}, 4] k, float[1, 1, {keys}, {total}] v"
    value = np.eye(total, dtype=np.float32)[None, None]  # so that the result is what each query looks at
    feed: dict[str, npt.NDArray[Any]] = {
        "q": np.zeros((1, 1, new, 4)),
        "k": np.zeros((1, 1, keys, 4)),
        "v": value[:, :, total - keys :],
    }
    operands, results, offset = "q, k, v", "y", 0
    if where == "past":
        inputs += f", float[1, 1, 4, 4] pk, float[1, 1, 4, {total}] pv"
        feed |= {"pk": np.zeros((1, 1, 4, 4)), "pv": value[:, :, :4]}
        operands, results, offset = "q, k, v, , pk, pv", "y, a, b", 4
    feed = {name: array.astype(np.float32) for name, array in feed.items()}
    if where == "nonpad_kv_seqlen":
        inputs, operands, offset = f"{inputs}, int64[1] n", "q, k, v, , , , n", 5 - new
        feed["n"] = np.array([5])
    attention = f"{results} = Attention <is_causal = 1> ({operands})"
    text = f"g ({inputs}) => (float[1, 1, {new}, {total}] y) {{ {attention} }}"
    model = ir.from_onnx_text(f'<ir_version: 11, opset_import: ["" : {opset}]> {text}')
    expected = np.arange(total) <= np.arange(new)[:, None] + offset
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for found in (evaluate(model, feed)[0], session.run(None, feed)[0]):
        np.testing.assert_array_equal(found[0, 0] > 0, expected)
