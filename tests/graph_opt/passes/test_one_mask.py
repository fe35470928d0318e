from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.passes.one_mask import OneMaskPass
from carryall.graph_opt.probe import MaskMeaning, mask_meaning

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
def test_every_form_becomes_one_mask(
    body: str, mask: str, attributes: str, padding: bool, window: int | None
) -> None:
    model = decoder(body, mask, attributes, padding)
    assert apply(OneMaskPass(), model) == []
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
    assert apply(OneMaskPass(), model) == ["the mask adds a bias to visible keys"]
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert node.inputs[3] is not None
    assert node.inputs[3].name == "added"
