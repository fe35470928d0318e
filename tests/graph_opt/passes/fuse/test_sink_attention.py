from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph
from onnx_ir.passes import common

from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.passes.fuse.sink_attention import SeparateSinksPass, SinkAttentionPass, sinks_of

SINKS = np.array([-1.0, 0.5, 9.0, 30.0], np.float32)  # the largest take almost all weight
SHAPES = """float[B, S, 32] q, float[B, S, 16] k, float[B, S, 16] v, float[B, 1, S, T] mask,
    float[B, 2, P, 8] past_key_values.0.key, float[B, 2, P, 8] past_key_values.0.value"""
OUTPUTS = "float[B, S, 32] y, float[B, 2, T, 8] key, float[B, 2, T, 8] value"
CONSTANTS = {
    "sinks": SINKS,
    "by_group": np.array([0, 0, 2, 2, 8]),
    "new_heads": np.array([0, 0, 2, 1, 8]),
    "heads4": np.array([0, 0, 4, 8]),
    "heads2": np.array([0, 0, 2, 8]),
    "sink_shape": np.array([1, 2, 2, 1, 1]),
    "sink_shape4": np.array([1, 4, 1, 1]),
    "wide": np.array([0, 0, 32]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "all_heads": np.array([0, 4, -1, 8]),
    "one": np.array([1]),
    "two": np.array([2]),
    "last": np.array([-1]),
    "zero": np.array([0]),
    "factor": np.float32(0.3),
    "cap": np.float32(5),
    "lowest": np.finfo(np.float32).min,
}
CACHES = """k5 = Reshape(k, new_heads) kt = Transpose <perm = [0, 2, 3, 1, 4]> (k5) k4 = Squeeze(kt, two)
    v5 = Reshape(v, new_heads) vt = Transpose <perm = [0, 2, 3, 1, 4]> (v5) v4 = Squeeze(vt, two)
    key = Concat <axis = 2> (past_key_values.0.key, k4)
    value = Concat <axis = 2> (past_key_values.0.value, v4)"""
EXPORTED = f"""q5 = Reshape(q, by_group) qt = Transpose <perm = [0, 2, 3, 1, 4]> (q5) {CACHES}
    ku = Unsqueeze(key, two) keys = Transpose <perm = [0, 1, 2, 4, 3]> (ku)
    qs = Mul(qt, factor) s0 = MatMul(qs, keys) m5 = Unsqueeze(mask, one) s = Add(s0, m5)
    sink = Reshape(sinks, sink_shape) top = ReduceMax <keepdims = 1> (s, last) most = Max(top, sink)
    low = Sub(s, most) powers = Exp(low) sum = ReduceSum <keepdims = 1> (powers, last)
    rest = Sub(sink, most) share = Exp(rest) total = Add(sum, share) weights = Div(powers, total)
    vu = Unsqueeze(value, two) o = MatMul(weights, vu) ot = Transpose <perm = [0, 3, 1, 2, 4]> (o)
    y = Reshape(ot, wide)"""
# transformers' eager_attention_forward: concatenate the sinks, softmax, drop the last column.
TRACED = """q4 = Reshape(q, heads4) qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    k4 = Reshape(k, heads2) kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    v4 = Reshape(v, heads2) vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    key = Concat <axis = -2> (past_key_values.0.key, kt)
    value = Concat <axis = -2> (past_key_values.0.value, vt)
    ku = Unsqueeze(key, two) kx = Expand(ku, twice) kh = Reshape(kx, all_heads)
    vu = Unsqueeze(value, two) vx = Expand(vu, twice) vh = Reshape(vx, all_heads)
    keys = Transpose <perm = [0, 1, 3, 2]> (kh) s0 = MatMul(qt, keys) s1 = Mul(s0, factor) s = {masked}
    sink = Reshape(sinks, sink_shape4) b = Shape <start = 0, end = 1> (qt) n = Shape <start = 2, end = 3> (qt)
    shape = Concat <axis = 0> (b, one, n, one) spread = Expand(sink, shape)
    joined = Concat <axis = -1> (s, spread) top = ReduceMax <keepdims = 1> (joined, last)
    low = Sub(joined, top) p = Softmax <axis = -1> (low) weights = Slice(p, zero, last, last)
    o = MatMul(weights, vh) ot = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(ot, wide)"""
ADDED = TRACED.format(masked="Add(s1, mask)")
CAPPED = TRACED.format(masked="Add(s4, mask)").replace(
    "s = Add", "s2 = Div(s1, cap) s3 = Tanh(s2) s4 = Mul(s3, cap) s = Add"
)
SEEN = TRACED.format(masked="Where(visible, s1, lowest)").replace("s0 =", "visible = Less(mask, factor) s0 =")
FUSED = """y, key, value = Attention <q_num_heads = 4, kv_num_heads = 2, scale = 0.3> (
    q, k, v, mask, past_key_values.0.key, past_key_values.0.value)"""


def model(body: str, **changed: np.ndarray) -> ir.Model:
    text = f"g ({SHAPES}) => ({OUTPUTS}) {{ {body} }}"
    text = text.replace("past_key_values.0.", "past_")
    made = graph(text, **{**CONSTANTS, **changed})
    for value in made.graph.inputs:
        value.name = str(value.name).replace("past_", "past_key_values.0.")
    common.ShapeInferencePass()(made)
    return made


@pytest.mark.parametrize("body", [EXPORTED, ADDED], ids=["exported", "traced"])
def test_becomes_attention_that_holds_its_sinks(body: str) -> None:
    found = model(body)
    assert apply(SinkAttentionPass(), found) == []
    assert_same(found, model(FUSED))


def test_a_softcap_becomes_an_attribute() -> None:
    found = model(CAPPED)
    assert apply(SinkAttentionPass(), found) == []
    assert_same(found, model(FUSED.replace("scale = 0.3", "scale = 0.3, softcap = 5.0")))


@pytest.mark.parametrize("body", [EXPORTED, ADDED, CAPPED], ids=["exported", "traced", "capped"])
def test_attention_with_the_sinks_held_gives_the_numbers(body: str) -> None:
    """A sink is a key whose score is the sink and whose value is zero."""
    rng, found = np.random.default_rng(0), model(body)
    shapes = {"q": (2, 3, 32), "k": (2, 3, 16), "v": (2, 3, 16), "mask": (2, 1, 3, 8)}
    shapes |= dict.fromkeys(["past_key_values.0.key", "past_key_values.0.value"], (2, 2, 5, 8))
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    expected = evaluate(found, feed)[0]
    SinkAttentionPass()(found)
    (node,) = nodes_of(found.graph, "Attention")
    sinks = sinks_of(found.graph, node, ir.DataType.FLOAT)
    assert sinks is not None
    assert sinks.const_value is not None
    for head in range(4):
        parts = [feed["q"].reshape(2, 3, 4, 8)[:, :, head]]
        for new, past in (("k", "key"), ("v", "value")):
            heads = feed[new].reshape(2, 3, 2, 8)[:, :, head // 2]
            parts.append(np.concatenate([feed[f"past_key_values.0.{past}"][:, head // 2], heads], 1))
        scores = node.attributes["scale"].as_float() * parts[0] @ parts[1].swapaxes(1, 2)
        if "softcap" in node.attributes:
            scores = 5 * np.tanh(scores / 5)
        powers = np.exp((scores + feed["mask"][:, 0]).astype(np.float64))
        total = powers.sum(-1, keepdims=True) + np.exp(np.float64(sinks.const_value.numpy()[head]))
        wanted = powers / total @ parts[2]
        np.testing.assert_allclose(expected[..., head * 8 : head * 8 + 8], wanted, rtol=1e-4, atol=1e-6)


def test_sinks_are_a_vector_of_the_type_asked_for() -> None:
    found = model(EXPORTED.replace("sink = Reshape(sinks, sink_shape)", "sink = Identity(sinks)"),
                  sinks=SINKS.reshape(1, 2, 2, 1, 1))  # fmt: skip
    SinkAttentionPass()(found)
    (node,) = nodes_of(found.graph, "Attention")
    sinks = sinks_of(found.graph, node, ir.DataType.FLOAT16)
    assert sinks is not None
    assert sinks.const_value is not None
    np.testing.assert_array_equal(sinks.const_value.numpy(), SINKS.astype(np.float16))


SHAPES_OF_FEED = {"q": (2, 3, 32), "k": (2, 3, 16), "v": (2, 3, 16), "mask": (2, 1, 3, 8)}


@pytest.mark.parametrize(
    "body", [EXPORTED, ADDED, CAPPED, SEEN], ids=["exported", "traced", "capped", "seen"]
)
def test_written_apart_again_it_gives_the_same_numbers(body: str) -> None:
    rng, found = np.random.default_rng(0), model(body)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES_OF_FEED.items()}
    for name in ("past_key_values.0.key", "past_key_values.0.value"):
        feed[name] = rng.standard_normal((2, 2, 5, 8)).astype(np.float32)
    expected = evaluate(found, feed)
    SinkAttentionPass()(found)
    assert apply(SeparateSinksPass(), found) == []
    assert not list(nodes_of(found.graph, "Attention"))
    for got, wanted in zip(evaluate(found, feed), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


REFUSED = {
    "sinks are not a constant": (EXPORTED.replace("Reshape(sinks,", "Reshape(given,"), None),
    "the weights of the sinks are kept in": (
        EXPORTED.replace("weights = Div(powers, total)", "weights = Div(powers, sum)"),
        "the nodes around its softmax do not compute attention",
    ),
    "a mask for each head that is multiplied": (
        TRACED.format(masked="Mul(s1, mask)"),
        "the nodes around its softmax do not compute attention",
    ),
    "no mask": (TRACED.format(masked="Identity(s1)"), "it adds no mask"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_another_computation_stays(name: str) -> None:
    body, reason = REFUSED[name]
    if reason is None:
        made = model(
            body.replace("Reshape(given,", "Reshape(q1,").replace("q5 =", "q1 = Identity(sinks) q5 =")
        )
        made.graph.inputs.append(made.graph.initializers.pop("sinks"))
    else:
        made = model(body)
    before = len(list(made.graph))
    reasons = apply(SinkAttentionPass(), made)
    assert not list(nodes_of(made.graph, "Attention"))
    assert len(list(made.graph)) <= before
    assert [one for one in reasons if reason and reason in one] or reason is None
