from __future__ import annotations

import numpy as np
import numpy.typing as npt
from graph_asserts import apply, assert_same, canonical, graph

from carryall.graph_opt.lower.products.merge import MergeProjectionsPass, PackedQKVPass

SIGNATURE = "g (float[B, S, 4] x) => (float[B, S, 2] a, float[B, S, 4] b)"


def weights(columns: int, start: int = 0) -> npt.NDArray[np.float32]:
    return np.arange(start, start + 4 * columns, dtype=np.float32).reshape(4, columns)


def test_float_weights_lie_side_by_side() -> None:
    p, q = weights(2), weights(4, 100)
    model = graph(f"{SIGNATURE} {{ a = MatMul(x, p) b = MatMul(x, q) }}", p=p, q=q)
    pass_ = MergeProjectionsPass()
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    merged = {"w": np.concatenate([p, q], 1), "sizes": np.array([2, 4])}
    assert_same(
        model, graph(f"{SIGNATURE} {{ y = MatMul(x, w) a, b = Split <axis = -1> (y, sizes) }}", **merged)
    )


def test_biases_are_merged_too() -> None:
    constants = {"p": weights(2), "q": weights(4), "c": np.ones(2, np.float32), "d": np.zeros(4, np.float32)}
    body = "m = MatMul(x, p) a = Add(m, c) n = MatMul(x, q) b = Add(d, n)"
    model = graph(f"{SIGNATURE} {{ {body} }}", **constants)
    assert apply(MergeProjectionsPass(), model) == []
    merged = {
        "w": np.concatenate([constants["p"], constants["q"]], 1),
        "bias": np.array([1, 1, 0, 0, 0, 0], np.float32),
        "sizes": np.array([2, 4]),
    }
    body = "m = MatMul(x, w) y = Add(m, bias) a, b = Split <axis = -1> (y, sizes)"
    assert_same(model, graph(f"{SIGNATURE} {{ {body} }}", **merged))


def test_blocked_weights_are_merged_before_their_dequantization() -> None:
    model = graph(
        f"""{SIGNATURE} {{
            v = DequantizeLinear <axis = 0, block_size = 2> (p, s) a = MatMul(x, v)
            w = DequantizeLinear <axis = 0, block_size = 2> (q, t) b = MatMul(x, w) }}""",
        p=np.ones((4, 2), np.int8),
        s=np.ones((2, 2), np.float32),
        q=np.full((4, 4), 3, np.int8),
        t=np.full((2, 4), 2, np.float32),
    )
    assert apply(MergeProjectionsPass(), model) == []
    merged = {
        "p": np.repeat(np.array([[1, 3]], np.int8), 4, 0).repeat([2, 4], 1),
        "s": np.repeat(np.array([[1, 2]], np.float32), 2, 0).repeat([2, 4], 1),
        "sizes": np.array([2, 4]),
    }
    body = """w = DequantizeLinear <axis = 0, block_size = 2> (p, s)
              y = MatMul(x, w) a, b = Split <axis = -1> (y, sizes)"""
    assert_same(model, graph(f"{SIGNATURE} {{ {body} }}", **merged))


def test_what_is_alike_is_merged_beside_what_is_not() -> None:
    """Gate and up of a shared expert in 8 bits, and a float router between them."""
    gate, up = (
        "w = DequantizeLinear <axis = 0, block_size = 2> (p, s) a = MatMul(x, w)",
        "v = DequantizeLinear <axis = 0, block_size = 2> (q, t) b = MatMul(x, v)",
    )
    signature = "g (float[N, 4] x) => (float[N, 2] a, float[N, 4] b, float[N, 3] r)"
    given = {
        "p": np.ones((4, 2), np.int8),
        "s": np.ones((2, 2), np.float32),
        "q": np.full((4, 4), 3, np.int8),
        "t": np.full((2, 4), 2, np.float32),
        "router": weights(3),
    }
    model = graph(f"{signature} {{ {gate} r = MatMul(x, router) {up} }}", **given)
    assert apply(MergeProjectionsPass(), model) == []
    merged = {
        "p": np.repeat(np.array([[1, 3]], np.int8), 4, 0).repeat([2, 4], 1),
        "s": np.repeat(np.array([[1, 2]], np.float32), 2, 0).repeat([2, 4], 1),
        "sizes": np.array([2, 4]),
        "router": given["router"],
    }
    body = """w = DequantizeLinear <axis = 0, block_size = 2> (p, s)
              y = MatMul(x, w) a, b = Split <axis = -1> (y, sizes) r = MatMul(x, router)"""
    assert_same(model, graph(f"{signature} {{ {body} }}", **merged))


def test_one_bias_of_two_prevents_merging() -> None:
    """A missing bias could be filled with zeros, but no model has such a pair."""
    body = "m = MatMul(x, p) a = Add(m, c) b = MatMul(x, q)"
    model = graph(f"{SIGNATURE} {{ {body} }}", p=weights(2), q=weights(4), c=np.ones(2, np.float32))
    before = canonical(model)
    assert "differ in weight type, block size or bias" in apply(MergeProjectionsPass(), model)[0]
    assert canonical(model) == before


def test_a_weight_with_two_readers_is_not_copied() -> None:
    """Merging would store it twice."""
    body = (
        "a = MatMul(x, p) b0 = MatMul(x, q) c = MatMul(x, p) b1 = Concat <axis = -1> (c, c) b = Add(b0, b1)"
    )
    model = graph(f"{SIGNATURE} {{ {body} }}", p=weights(2), q=weights(4))
    before = canonical(model)
    assert apply(MergeProjectionsPass(), model) == ["its weight has other consumers"] * 2
    assert canonical(model) == before


def test_products_of_activations_are_no_projections() -> None:
    model = graph(
        "g (float[B, 4, 4] x) => (float[B, 4, 4] a, float[B, 4, 4] b) { a = MatMul(x, x) b = MatMul(x, a) }"
    )
    before = canonical(model)
    assert apply(MergeProjectionsPass(), model) == []
    assert canonical(model) == before


ATTENTION = "g (float[B, S, 8] x, float[B, 2, M, 8] pk, int32[B] n, int32 t) => (float[B, S, 4] y)"
GROUP_QUERY = """y, a, b = com.microsoft.GroupQueryAttention
    <num_heads = 2, kv_num_heads = 1> ({}, pk, pk, n, t)"""


def test_attention_takes_q_k_and_v_unsplit() -> None:
    split = "q, k, v = Split <axis = -1> (x, sizes)"
    body = GROUP_QUERY.format("q, k, v")
    model = graph(f"{ATTENTION} {{ {split} {body} }}", sizes=np.array([4, 2, 2]))
    assert apply(PackedQKVPass(), model) == []
    assert_same(model, graph(f"{ATTENTION} {{ {GROUP_QUERY.format('x, , ')} }}"))


def test_parts_in_another_order_stay_split() -> None:
    """The kernel expects q, then k, then v."""
    split = "k, q, v = Split <axis = -1> (x, sizes)"
    body = GROUP_QUERY.format("q, k, v")
    model = graph(f"{ATTENTION} {{ {split} {body} }}", sizes=np.array([2, 4, 2]))
    before = canonical(model)
    apply(PackedQKVPass(), model)
    assert canonical(model) == before
