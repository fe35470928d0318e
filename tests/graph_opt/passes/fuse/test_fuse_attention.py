from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph
from onnx_ir.passes import common

from carryall.graph_opt.passes.fuse.fuse_attention import FuseAttentionPass

H, KV, D = 4, 2, 8
SHAPES = f"""float[B, {H}, S, {D}] q, float[B, {KV}, S, {D}] k, float[B, {KV}, S, {D}] v,
    float[B, {KV}, P, {D}] pk, float[B, {KV}, P, {D}] pv"""
VALUES = f"""<float[B, {KV}, T, {D}] ck, float[B, {KV}, T, {D}] cv, float[B, {KV}, 1, T, {D}] ku,
    float[B, {KV}, 1, T, {D}] vu, float[B, {KV}, 2, T, {D}] kx, float[B, {KV}, 2, T, {D}] vx,
    float[B, {H}, T, {D}] kh, float[B, {H}, T, {D}] vh, float[B, {H}, {D}, T] kt, float[B, {H}, S, T] s,
    float[B, {H}, S, T] m, float[B, {H}, S, T] c, float[B, {H}, S, T] p, float[B, 1, S, T] bias>"""
CACHE = "ck = Concat <axis = 2> (pk, k) cv = Concat <axis = 2> (pv, v)"
FRESH = "ck = Identity(k) cv = Identity(v)"
REPEAT = """ku = Unsqueeze(ck, two) kx = Expand(ku, twice) kh = Reshape(kx, joined)
    vu = Unsqueeze(cv, two) vx = Expand(vu, twice) vh = Reshape(vx, joined)"""
SCORES = "kt = Transpose <perm = [0, 1, 3, 2]> (kh) s0 = MatMul(q, kt) s = Mul(s0, scale)"
REST = "p = Softmax <axis = -1> (m) y = MatMul(p, vh)"
GIVEN = {
    "two": np.array([2]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "joined": np.array([0, H, -1, D]),
    "scale": np.float32(0.25),
    "cap": np.float32(5),
    "zero": np.float32(0),
    "one": np.float32(1),
    "low": np.float32(-10000),
    "lowest": np.float32(-3.4e38),
}
CAPPED = "s1 = Mul(s0, scale) s2 = Div(s1, cap) s3 = Tanh(s2) s = Mul(s3, cap)"
LOW = np.finfo(np.float32).min

FORMS = {
    "additive": ("float[B, 1, S, T] mask", "m = Add(s, mask)"),
    "bool by Where": ("bool[B, 1, S, T] mask", "m = Where(mask, s, lowest)"),
    "bool, hidden": ("bool[B, 1, S, T] mask", "m = Where(mask, lowest, s)"),
    "bool made additive": (
        "bool[B, 1, S, T] mask",
        "b = Where(mask, zero, lowest) bias = Identity(b) m = Add(s, bias)",
    ),
    "ones": (
        "float[B, 1, S, T] mask",
        "a = Mul(s, mask) o = Sub(one, mask) bias = Mul(o, low) m = Add(a, bias)",
    ),
    "a bias for each head": (f"float[B, {H}, S, T] mask", "m = Add(s, mask)"),
}


def traced(form: str, cache: str = CACHE, cap: bool = False) -> ir.Model:
    mask, masked = FORMS[form]
    scores = SCORES.replace(
        "s = Mul(s0, scale)", "s1 = Mul(s0, scale) s2 = Div(s1, cap) s3 = Tanh(s2) s = Mul(s3, cap)"
    )
    body = f"{cache} {REPEAT} {scores if cap else SCORES} {masked} {REST}"
    text = (
        f"g ({SHAPES}, {mask}) => (float[B, {H}, S, {D}] y, float[B, {KV}, T, {D}] ck) {VALUES} {{ {body} }}"
    )
    model = graph(text, **GIVEN)
    common.ShapeInferencePass()(model)
    return model


def feed(form: str, past: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    length = past + 3
    arrays = {"q": (H, 3), "k": (KV, 3), "v": (KV, 3), "pk": (KV, past), "pv": (KV, past)}
    given: dict[str, object] = {
        name: rng.standard_normal((2, heads, n, D)).astype(np.float32) for name, (heads, n) in arrays.items()
    }
    seen = rng.random((2, 1, 3, length)) < 0.7
    seen[..., 0] = True
    masks = {
        "additive": np.where(seen, 0, LOW).astype(np.float32),
        "bool, hidden": ~seen,
        "ones": seen.astype(np.float32),
        "a bias for each head": rng.standard_normal((2, H, 3, length)).astype(np.float32),
    }
    return given | {"mask": masks.get(form, seen)}


def fused(model: ir.Model) -> ir.Node:
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    assert len(nodes) == 1
    assert "Softmax" not in {node.op_type for node in model.graph}
    return nodes[0]


@pytest.mark.parametrize("cap", [False, True], ids=["", "capped"])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_mask_form(form: str, cap: bool) -> None:
    model, given = traced(form, cap=cap), feed(form, past=4)
    expected = evaluate(traced(form, cap=cap), given)
    assert apply(FuseAttentionPass(), model) == []
    node = fused(model)
    assert node.attributes["scale"].as_float() == 0.25
    assert ("softcap" in node.attributes) == cap
    assert len(node.inputs) == 6
    for found, wanted in zip(evaluate(model, given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_without_a_cache() -> None:
    model, given = traced("additive", FRESH), feed("additive", past=0)
    expected = evaluate(traced("additive", FRESH), given)
    assert apply(FuseAttentionPass(), model) == []
    assert len(fused(model).outputs) == 1
    np.testing.assert_allclose(evaluate(model, given)[0], expected[0], rtol=2e-5, atol=2e-5)


def test_causal_by_attribute() -> None:
    text = f"""g ({SHAPES.split(", float[B, 2, P")[0].strip().rstrip(",")}) => (float[B, {H}, S, {D}] y) {{
        y = Attention <is_causal = 1> (q, k, v) }}"""
    model, given = graph(text), feed("additive", past=0)
    given = {name: given[name] for name in "qkv"}
    expected = evaluate(graph(text), given)
    assert apply(FuseAttentionPass(), model) == []
    node = fused(model)
    assert node.attributes["is_causal"].as_int() == 1
    assert node.attributes["q_num_heads"].as_int() == H
    np.testing.assert_allclose(evaluate(model, given)[0], expected[0], rtol=2e-5, atol=2e-5)


def test_scores_with_another_function_stay() -> None:
    """Squared scores have the shape of attention scores but are not attention."""
    model = traced("additive")
    text = (
        f"{CACHE} {REPEAT} {SCORES.replace('s = Mul(s0, scale)', 's = Mul(s0, s0)')} m = Add(s, mask) {REST}"
    )
    signature = f"g ({SHAPES}, float[B, 1, S, T] mask) => (float[B, {H}, S, {D}] y) {VALUES}"
    model = graph(f"{signature} {{ {text} }}", **GIVEN)
    reasons = apply(FuseAttentionPass(), model)
    assert len(reasons) == 1
    assert "Softmax" in {node.op_type for node in model.graph}


def test_scores_joined_with_sinks_stay_with_a_reason() -> None:
    text = f"""{CACHE} {REPEAT} {SCORES} m = Add(s, mask) j = Concat <axis = -1> (m, sinks)
        p = Softmax <axis = -1> (j) w = Slice(p, first, last, last) y = MatMul(w, vh)"""
    signature = (
        f"g ({SHAPES}, float[B, 1, S, T] mask, float[B, {H}, S, 1] sinks) => (float[B, {H}, S, {D}] y)"
    )
    model = graph(f"{signature} {VALUES} {{ {text} }}", first=np.array([0]), last=np.array([-1]), **GIVEN)
    common.ShapeInferencePass()(model)
    (reason,) = apply(FuseAttentionPass(), model)
    assert reason.startswith("its scores are joined with others, such as sinks")


def test_a_softmax_that_a_router_ranks_is_no_near_miss() -> None:
    text = """g (float[N, 8] x) => (float[N, 2] best, int64[N, 2] chosen) {
        scores = MatMul(x, router) likely = Softmax(scores) best, chosen = TopK(likely, two) }"""
    model = graph(text, router=np.ones((8, 4), np.float32), two=np.array([2]))
    assert apply(FuseAttentionPass(), model) == []


def test_keys_with_one_transpose_for_heads_and_product() -> None:
    text = f"""g (float[B, {H}, S, {D}] q, float[B, S, {H}, {D}] k3, float[B, {H}, S, {D}] v)
        => (float[B, {H}, S, {D}] y)
        <float[B, {H}, {D}, S] kt, float[B, {H}, S, S] s0, float[B, {H}, S, S] s> {{
        kt = Transpose <perm = [0, 2, 3, 1]> (k3) s0 = MatMul(q, kt) s = Mul(s0, scale)
        p = Softmax <axis = -1> (s) y = MatMul(p, v) }}"""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, H, 3, D), "k3": (2, 3, H, D), "v": (2, H, 3, D)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = graph(text, **GIVEN)
    assert apply(FuseAttentionPass(), model) == []
    fused(model)
    expected = evaluate(graph(text, **GIVEN), given)[0]
    np.testing.assert_allclose(evaluate(model, given)[0], expected, rtol=2e-5, atol=2e-5)


def test_two_masks_are_added() -> None:
    """A causal table and a padding mask are added; a mask that reads the keys' shape makes no cycle."""
    sizes = "size = Shape <start = 2, end = 3> (ck) order = Slice(table, first, size, along)"
    masked = f"{sizes} m0 = Where(order, s, lowest) m = Add(m0, mask)"
    text = f"""g ({SHAPES}, float[B, 1, S, T] mask, bool[1, 1, S, 9] table) =>
        (float[B, {H}, S, {D}] y, float[B, {KV}, T, {D}] ck, float[B, {KV}, T, {D}] cv)
        {VALUES.replace("bias>", "bias, bool[1, 1, S, T] order, float[B, " + str(H) + ", S, T] m0>")}
        {{ {CACHE} {REPEAT} {SCORES} {masked} {REST} }}"""
    names = ("q", "k", "v", "pk", "pv", "mask")
    given = {name: array for name, array in feed("additive", past=4).items() if name in names}
    given["table"] = (np.arange(9) <= np.arange(3)[:, None] + 4)[None, None]
    constants = {**GIVEN, "first": np.array([0]), "along": np.array([3])}
    model, expected = graph(text, **constants), evaluate(graph(text, **constants), given)
    common.ShapeInferencePass()(model)
    assert apply(FuseAttentionPass(), model) == []
    assert len(fused(model).inputs) == 6
    common.TopologicalSortPass()(model)
    for found, wanted in zip(evaluate(model, given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_the_scale_of_an_attention_is_kept_when_its_cache_joins_it() -> None:
    """transformers' granite has its own scale."""
    names = ("q", "k", "v", "pk", "pv", "mask")
    text = f"""g ({SHAPES}, float[B, 1, S, T] mask) => (float[B, {H}, S, {D}] y, float[B, {KV}, T, {D}] ck)
        {VALUES} {{ {CACHE} y = Attention <scale = 0.1> (q, ck, cv, mask) }}"""
    given = {name: array for name, array in feed("additive", past=4).items() if name in names}
    model, expected = graph(text), evaluate(graph(text), given)
    common.ShapeInferencePass()(model)
    assert apply(FuseAttentionPass(), model) == []
    assert len(fused(model).inputs) == 6
    assert fused(model).attributes["scale"].as_float() == pytest.approx(0.1)
    for found, wanted in zip(evaluate(model, given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
