"""Paged attention goes to carryall's PagedDecode of CUDA exactly where its kernel computes it."""

from __future__ import annotations

import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.pipelines.paged_decode import PagedDecodePass

PLAIN = {"heads": "4", "size": "64", "scale": "0.125", "kind": "float16", "cache": "float16", "kinds": ""}


def attention(domain: str, operands: str = "x, , , k, v, b, p, t, , , , , , , , , m", **changed: str) -> str:
    facts = {**PLAIN, **changed}
    cache = f"{facts['cache']}[blocks, 16, 2, {facts['size']}]"
    own = domain == "carryall"
    attributes = f"num_heads = {facts['heads']}, kv_num_heads = 2, scale = {facts['scale']}"
    defaults = (
        "do_rotary = 0, rotary_interleaved = 0, local_window_size = -1, softcap = 0.0, qk_norm_epsilon = 1e-6"
    )
    attributes += f", {defaults}, channels = {int(bool(facts['kinds']))}" if own else facts["kinds"]
    operator = "carryall.PagedDecode" if own else "com.microsoft.PagedAttention"
    return f"""g ({facts["kind"]}[tokens, width] x, {cache} k, {cache} v, int32[e] b, int32[rows] p,
        int32[rows, w] t, int32[tokens] s, float[2] scale, int32[3] m)
        => ({facts["kind"]}[tokens, out] y, {cache} nk, {cache} nv)
        {{ y, nk, nv{", parts" * own} = {operator}<{attributes}>({operands}) }}"""


CHANNELS = ', k_quant_type = "PER_CHANNEL", v_quant_type = "PER_CHANNEL", kv_cache_bit_width = 8'
SCALED = "x, , , k, v, b, p, t, , , , , , , scale, scale, m"


@pytest.mark.parametrize(
    ("operands", "changed"),
    [
        ("x, , , k, v, b, p, t, , , , , , , , , m", {}),
        ("x, , , k, v, b, p, t, , , , , , , , , m", {"heads": "8", "size": "256"}),
        ("x, , , k, v, b, p, t, , , , , , , , , m", {"kind": "bfloat16", "cache": "bfloat16"}),
        (SCALED, {"cache": "int8", "kinds": CHANNELS}),
        (SCALED, {"cache": "float8e4m3fn", "kinds": CHANNELS, "kind": "bfloat16"}),
    ],
)
def test_attention_that_the_kernel_computes(operands: str, changed: dict[str, str]) -> None:
    before = graph(attention("com.microsoft", operands, **changed))
    assert apply(PagedDecodePass(), before) == []
    assert_same(before, graph(attention("carryall", operands, **changed)))


@pytest.mark.parametrize(
    ("operands", "changed", "reason"),
    [
        (None, {"heads": "10"}, "4 query heads of a KV head, not 5"),
        (None, {"size": "264"}, "does not read heads of 264"),
        (None, {"size": "20"}, "does not read heads of 20"),
        (None, {"scale": "0.0"}, "the scale is not stated"),
        (None, {"kind": "float", "cache": "float"}, "float16 or bfloat16 only"),
        (None, {"cache": "bfloat16"}, "float16 or bfloat16 only"),
        ("x, x, x, k, v, b, p, t, , , , , , , , , m", {}, "packed query, key and value only"),
        ("x, , , k, v, b, p, t, , , s, , , , , , m", {}, "no slot mapping"),
    ],
)
def test_others_are_left_to_onnxruntime(operands: str | None, changed: dict[str, str], reason: str) -> None:
    text = attention("com.microsoft", *filter(None, [operands]), **changed)
    made, same = graph(text), graph(text)
    (refusal,) = apply(PagedDecodePass(), made)
    assert reason in refusal
    assert_same(made, same)
