"""Attention of encoders with any mask is lowered to onnxruntime's kernel with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.attention.multi_head_attention import MultiHeadAttentionPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes
from carryall.providers import get_provider

RNG = np.random.default_rng(0)
INPUTS = "float[b, s, 8] q, float[b, t, 8] k, float[b, t, 8] v"
HEADS = "q_num_heads = 2, kv_num_heads = 2"
MASKED = f"g ({INPUTS}, float[b, 1, s, t] m) => (float[b, s, 8] y)"


def test_a_full_mask_is_a_bias() -> None:
    model = graph(f"{MASKED} {{ y = Attention <{HEADS}, scale = 0.25> (q, k, v, m) }}")
    assert apply(MultiHeadAttentionPass(), model) == []
    call = "com.microsoft.MultiHeadAttention <num_heads = 2, scale = 0.25> (q, k, v, , , m)"
    assert_same(model, graph(f"{MASKED} {{ y = {call} }}"))


def test_a_key_mask_is_expanded_once_for_all_attentions() -> None:
    text = f"""g ({INPUTS}, float[b, 1, 1, t] m) => (float[b, s, 8] y) <float[b, s, 8] a> {{
        a = Attention <{HEADS}> (q, k, v, m) y = Attention <{HEADS}> (a, k, v, m) }}"""
    model = graph(text)
    assert apply(MultiHeadAttentionPass(), model) == []
    assert [node.op_type for node in model.graph] == [
        "Shape", "Concat", "Expand", "MultiHeadAttention", "MultiHeadAttention"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"g ({INPUTS}, float[t] m) => (float[b, s, 8] y) {{ y = Attention <{HEADS}> (q, k, v, m) }}",
         "its mask is not an fp32 tensor of 2 to 4 axes"),
        (f"g ({INPUTS}, bool[b, 1, s, t] m) => (float[b, s, 8] y) {{ y = Attention <{HEADS}> (q, k, v, m) }}",
         "its mask is not an fp32 tensor of 2 to 4 axes"),
        ("g (float[b, s, 8] q, float[b, t, 4] k, float[b, t, 4] v) => (float[b, s, 8] y) "
         "{ y = Attention <q_num_heads = 2, kv_num_heads = 1> (q, k, v) }",
         "its input is 4-D, or it has grouped queries"),
        (f"g ({INPUTS}) => (float[b, s, 8] y) {{ y = Attention <{HEADS}, softcap = 2.0> (q, k, v) }}",
         "the kernel does not support softcap"),
        (f"g ({INPUTS}) => (float[b, s, 8] y, float[b, 2, t, 4] p) "
         f"{{ y, p = Attention <{HEADS}> (q, k, v) }}", "it has a cache, or more than one output"),
    ],
)  # fmt: skip
def test_unsupported_attention_stays(text: str, reason: str) -> None:
    model, before = (graph(text) for _ in range(2))
    assert apply(MultiHeadAttentionPass(), model) == [reason]
    assert_same(model, before)


GIVEN: dict[str, Any] = {
    **{name: (RNG.standard_normal((8, 8)) * 0.3).astype(np.float32) for name in ("wq", "wk", "wv")},
    "heads": np.array([0, 0, 2, 4]), "rows": np.array([0, 0, 8]), "half": np.float32(0.5),
    "zero": np.float32(0), "low": np.float32(-1e9), "axes": np.array([1, 2]), "steps": np.array(0),
}  # fmt: skip
ENCODER = """g (float[b, s, 8] x, int64[b, s] seen) => (float[b, s, 8] y) {{
    q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
    qh = Reshape(q, heads) kh = Reshape(k, heads) vh = Reshape(v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh) kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh) s0 = MatMul(qt, kt) c = Mul(s0, half) {mask}
    p = Softmax(m) o = MatMul(p, vt) ot = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape(ot, rows) }}"""
MASKS = {
    "of two axes": """sh = Shape <start = 2> (c) all = ConstantOfShape <value = float[1] {-1e9}> (sh)
        up = Trilu(all, one) m = Add(c, up)""",
    "of three axes": """sh = Shape <start = 1> (c) all = ConstantOfShape <value = float[1] {-1e9}> (sh)
        up = Trilu(all, one) m = Add(c, up)""",
    "none": "m = Identity(c)",
    "padding": """on = Cast <to = 9> (seen) wide = Unsqueeze(on, axes) a = Where(wide, zero, low)
        m = Add(c, a)""",
    "causal": """sh = Shape(c) all = ConstantOfShape <value = float[1] {-1e9}> (sh) up = Trilu(all, one)
        m = Add(c, up)""",
}


@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS)
def test_an_encoder_computes_the_same_on_the_cpu(mask: str) -> None:
    text = ENCODER.format(mask=MASKS[mask])
    before = graph(text, **GIVEN, one=np.array(1))
    after, _ = run(
        graph(text, **GIVEN, one=np.array(1)), model_passes(get_provider("cpu").model_passes()), debug=True
    )
    fused = [node.op_type for node in after.graph if node.domain == "com.microsoft"]
    assert fused == ["MultiHeadAttention"]
    assert after.opset_imports[""] == 23 or not any(node.op_type == "Attention" for node in after.graph)
    for batch, length in ((1, 1), (2, 7)):
        seen = np.ones((batch, length), np.int64)
        seen[:, length // 2 + 1 :] = 0
        feed = {"x": RNG.standard_normal((batch, length, 8)).astype(np.float32), "seen": seen}
        expected, found = (compute(model, feed) for model in (before, after))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_unsupported_attention_is_not_fused() -> None:
    """onnxruntime cannot compute the standard Attention with a mask of keys only, so it must not remain."""
    text = ENCODER.format(mask=MASKS["padding"]).replace("float[b", "float16[b")
    floats = {name: x for name, x in GIVEN.items() if x.dtype == np.float32 and name != "low"}
    halves = {name: x.astype(np.float16) for name, x in floats.items()} | {"low": np.float16(-6e4)}
    after, _ = run(graph(text, **(GIVEN | halves)), model_passes(get_provider("cpu").model_passes()))
    assert not any("Attention" in node.op_type for node in after.graph)


def compute(model: ir.Model, feed: dict[str, Any]) -> Any:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    wanted = {value.name for value in session.get_inputs()}
    return session.run(None, {name: content for name, content in feed.items() if name in wanted})[0]
