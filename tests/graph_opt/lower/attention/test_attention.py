from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.attention.attention import GroupQueryAttentionPass
from carryall.graph_opt.lower.kernels import CPU, Kernels

CONTEXT = 32
FREQUENCIES = np.array([1.0, 0.5, 0.25, 0.125, 0.1, 0.05, 0.025, 0.01], np.float32)
CONSTANTS = {
    "last": np.array([-1]),
    "frequencies": FREQUENCIES,
    "zero": np.int64(0),
    "one": np.int64(1),
    "axis1": np.array([1]),
    "axes12": np.array([1, 2]),
    "free": np.float32(0),
    "hidden": np.float32(-3e38),
    "window": np.int64(4),
}
INPUTS = """float[B, S, 64] q, float[B, S, 32] k, float[B, S, 32] v, int64[B, T] attention_mask,
    int64[B, S] position_ids, float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value"""
OUTPUTS = "float[B, S, 64] y, float[B, 2, T, 16] key, float[B, 2, T, 16] value"
ANGLES = """f = Cast <to = 1> (position_ids) u = Unsqueeze(f, last) angle = Mul(u, frequencies)
    cos = Cos(angle) sin = Sin(angle)"""
ROTATED = """rq = RotaryEmbedding <num_heads = 4> (q, cos, sin)
    rk = RotaryEmbedding <num_heads = 2> (k, cos, sin)"""
MASK = """s0 = Shape <start = 1, end = 2> (q) s = Squeeze(s0)
    p0 = Shape <start = 2, end = 3> (past_key) p = Squeeze(p0)
    t = Add(p, s) keys = Range(zero, t, one) rows = Range(p, t, one) queries = Unsqueeze(rows, axis1)
    near = LessOrEqual(keys, queries) oldest = Sub(queries, window) young = Greater(keys, oldest)
    visible = {visible} real0 = Cast <to = 9> (attention_mask) real = Unsqueeze(real0, axes12)
    seen = And(visible, real) mask = Where(seen, free, hidden)"""
CAUSAL = MASK.format(visible="Identity(near)")
WINDOW = MASK.format(visible="And(near, young)")
ATTRIBUTES = "q_num_heads = 4, kv_num_heads = 2, scale = 0.25"
ATTENTION = f"y, key, value = Attention <{ATTRIBUTES}> ({{}}, v, mask, past_key, past_value)"


def portable(body: str) -> ir.Model:
    """A graph whose mask reads the length of q, which stands for input_ids."""
    model = graph(f"g ({INPUTS}) => ({OUTPUTS}) {{ {body} }}", **CONSTANTS)
    names = {"past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value", "q": "input_ids"}
    for value in model.graph.inputs:
        value.name = names.get(str(value.name), value.name)
    return model


def lowered(attributes: str, operands: str, **tables: np.ndarray) -> ir.Model:
    kernel = f"y, key, value = com.microsoft.GroupQueryAttention <{attributes}> ({operands})"
    inputs = f"{INPUTS}, int32[batch] seqlens_k, int32 total_sequence_length"
    model = graph(f"g ({inputs}) => ({OUTPUTS}) {{ {kernel} }}", **tables)
    names = {"past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value", "q": "input_ids"}
    for value in model.graph.inputs:
        value.name = names.get(str(value.name), value.name)
    return model


def attention_pass(kernels: Kernels = CPU) -> GroupQueryAttentionPass:
    return GroupQueryAttentionPass(CONTEXT, kernels)


def tables() -> dict[str, np.ndarray]:
    angles = np.arange(CONTEXT, dtype=np.float32)[:, None] * FREQUENCIES
    return {"cos": np.cos(angles), "sin": np.sin(angles)}


HEADS = "num_heads = 4, kv_num_heads = 2, scale = 0.25"
OPERANDS = "q, k, v, past_key, past_value, seqlens_k, total_sequence_length"


def test_causal_attention_with_its_ropes_becomes_one_kernel() -> None:
    model = portable(f"{ANGLES} {ROTATED} {CAUSAL} {ATTENTION.format('rq, rk')}")
    pass_ = attention_pass()
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    attributes = f"{HEADS}, do_rotary = 1, rotary_interleaved = 0"
    assert_same(model, lowered(attributes, f"{OPERANDS}, cos, sin, position_ids", **tables()))
    assert model.metadata_props["context_length"] == str(CONTEXT)


def test_a_sliding_window_becomes_an_attribute() -> None:
    model = portable(f"{WINDOW} {ATTENTION.format('q, k')}")
    assert apply(attention_pass(), model) == []
    assert_same(model, lowered(f"{HEADS}, local_window_size = 4", OPERANDS))


def test_causality_may_be_an_attribute() -> None:
    body = ATTENTION.format("q, k").replace("mask", "").replace(ATTRIBUTES, f"{ATTRIBUTES}, is_causal = 1")
    model = portable(body)
    assert apply(attention_pass(), model) == []
    assert_same(model, lowered(HEADS, OPERANDS))


def test_softcap_is_carried_over() -> None:
    body = ATTENTION.format("q, k").replace(ATTRIBUTES, f"{ATTRIBUTES}, softcap = 50.0")
    model = portable(f"{CAUSAL} {body}")
    assert apply(attention_pass(), model) == []
    assert_same(model, lowered(f"{HEADS}, softcap = 50.0", OPERANDS))


@pytest.mark.parametrize(
    ("kernels", "rotated", "reasons"),
    [
        (dataclasses.replace(CPU, rotary_in_attention=False), ROTATED, []),
        (
            CPU,
            ROTATED.replace("(k, cos, sin)", "(k, sin, cos)"),
            ["q and k are rotated by different angles"],
        ),
        (
            CPU,
            ROTATED.replace("num_heads", "rotary_embedding_dim = 8, num_heads"),
            ["the kernel needs a rotary dimension divisible by 16, found 8"],
        ),
    ],
    ids=["the target has no such kernel", "q and k differ", "rotary size the kernel refuses"],
)
def test_a_rope_the_kernel_cannot_take_stays_and_reads_tables(
    kernels: Kernels, rotated: str, reasons: list[str]
) -> None:
    model = portable(f"{ANGLES} {rotated} {CAUSAL} {ATTENTION.format('rq, rk')}")
    assert apply(attention_pass(kernels), model) == reasons
    kinds = [node.op_type for node in model.graph]
    assert kinds == ["RotaryEmbedding", "RotaryEmbedding", "GroupQueryAttention"]
    for rope in list(model.graph)[:2]:
        assert rope.inputs[3] is not None
        assert rope.inputs[3].name == "position_ids"
        assert rope.inputs[1] is not None
        assert rope.inputs[1].const_value is not None
        assert rope.inputs[1].const_value.shape == (CONTEXT, 8)
    assert "do_rotary" not in model.graph[2].attributes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ATTENTION.format("q, k").replace("mask", ""), "it has no mask, so it is not causal"),
        (f"{MASK.format(visible='Not(near)')} {ATTENTION.format('q, k')}", "neither causal nor"),
        (
            f"{CAUSAL} {ATTENTION.format('q, k').replace(', past_key, past_value', '')}",
            "it has no KV cache",
        ),
        (
            f"{CAUSAL} {ATTENTION.format('q, k').replace(ATTRIBUTES, 'scale = 0.25')}",
            "its q, k and v are not [batch, sequence, heads * head_dim]",
        ),
    ],
    ids=["no mask", "a strange mask", "no cache", "4-D operands"],
)
def test_what_the_kernel_does_not_compute_stays(body: str, reason: str) -> None:
    model = portable(body)
    (refusal,) = apply(attention_pass(), model)
    assert reason in refusal
    assert model.graph[-1].op_type == "Attention"
