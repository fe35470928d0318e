"""Experts that compute every token in batched products, as transformers' gpt-oss is traced, become sparse."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.fuse.fuse_experts import FuseExpertsPass

HIDDEN, WIDTH, EXPERTS = 8, 6, 3
RNG = np.random.default_rng(0)
ARRAYS = {
    "router": (EXPERTS, HIDDEN),
    "router_bias": (EXPERTS,),
    "opens": (EXPERTS, HIDDEN, 2 * WIDTH),
    "opens_bias": (EXPERTS, 1, 2 * WIDTH),
    "closes": (EXPERTS, WIDTH, HIDDEN),
    "closes_bias": (EXPERTS, 1, HIDDEN),
}
WEIGHTS = {name: 3 * RNG.standard_normal(shape).astype(np.float32) for name, shape in ARRAYS.items()}
CONSTANTS = {
    "rows": np.array([-1, HIDDEN]),
    "two": np.array([2]),
    "one": np.array([1]),
    "last": np.array([-1]),
    "first": np.array([0]),
    "step": np.array([2]),
    "far": np.array([2**63 - 1]),
    "repeats": np.array([EXPERTS, 1]),
    "apart": np.array([EXPERTS, -1, HIDDEN]),
    "per_token": np.array([-1, 2, HIDDEN]),
    "per_expert": np.array([-1, EXPERTS]),
    "count": np.array(EXPERTS),
    "off_on": np.array([0, 1]),
    "alpha": np.float32(1.7),
    "beta": np.float32(1),
    "limit": np.float32(7),
    "lowest": np.float32(-7),
}
INTERLEAVED = """gate = Slice (opened, first, far, last, step)
    up = Slice (opened, one, far, last, step)"""
HALVES = "gate, up = Split <axis = -1, num_outputs = 2> (opened)"
CLIPPED = """g = Clip (gate, , limit) u = Clip (up, lowest, limit)
    scaled = Mul (g, alpha) s = Sigmoid (scaled) a = Mul (g, s)
    shifted = Add (u, beta) p = Mul (shifted, a)"""
PLAIN = "s = Sigmoid (gate) a = Mul (gate, s) p = Mul (a, up)"
CHOSEN = "best, chosen = TopK (scores, two) shares = Softmax (best)"


def dense(parts: str = INTERLEAVED, activation: str = CLIPPED, routing: str = CHOSEN) -> ir.Model:
    """Return a mixture in which every expert computes every token, and shares are scattered."""
    return graph(
        f"""g (float[batch, sequence, {HIDDEN}] x) => (float[batch, sequence, {HIDDEN}] y) {{
    tokens = Reshape (x, rows)
    scores = Gemm <transB = 1> (tokens, router, router_bias)
    {routing}
    shape = Shape (scores)
    zeros = ConstantOfShape (shape)
    spread = ScatterElements <axis = 1> (zeros, chosen, shares)
    tiled = Tile (tokens, repeats)
    all = Reshape (tiled, apart)
    product = MatMul (all, opens)
    opened = Add (product, opens_bias)
    {parts}
    {activation}
    down = MatMul (p, closes)
    closed = Add (closes_bias, down)
    turned = Transpose <perm = [1, 0]> (spread)
    share = Unsqueeze (turned, last)
    weighed = Mul (closed, share)
    sum = ReduceSum <keepdims = 0> (weighed, first)
    x_shape = Shape (x)
    back = Reshape (sum, x_shape)
    y = Neg (back)
}}""",
        **WEIGHTS,
        **CONSTANTS,
    )


def canonical(activation: str) -> ir.Model:
    """Return the canonical form: each expert computes the tokens that chose it."""
    experts = "".join(activation.replace("#", str(number)) for number in range(EXPERTS))
    groups, results = (", ".join(f"{name}{number}" for number in range(EXPERTS)) for name in ("group", "y"))
    return graph(
        f"""g (float[batch, sequence, {HIDDEN}] x) => (float[batch, sequence, {HIDDEN}] y) {{
    flat = Reshape (x, rows)
    scores = Gemm <transB = 1> (flat, router, router_bias)
    tokens = Reshape (x, rows)
    by_row = Reshape (scores, per_expert)
    likely = Softmax <axis = -1> (by_row)
    best, chosen = TopK <axis = -1> (likely, two)
    total = ReduceSum <keepdims = 1> (best, last)
    shares = Div (best, total)
    ids = Reshape (chosen, last)
    size = Shape (ids)
    sorted, order = TopK <axis = 0, largest = 0> (ids, size)
    token = Div (order, two)
    copies = Gather (tokens, token)
    hot = OneHot <axis = -1> (ids, count, off_on)
    sizes = ReduceSum <keepdims = 0> (hot, first)
    {groups} = Split <axis = 0> (copies, sizes)
    {experts}
    joined = Concat <axis = 0> ({results})
    order_size = Shape (order)
    back_sorted, places = TopK <axis = 0, largest = 0> (order, order_size)
    by_token = Gather (joined, places)
    of_token = Reshape (by_token, per_token)
    share = Unsqueeze (shares, one)
    mixed = MatMul (share, of_token)
    x_shape = Shape (x)
    back = Reshape (mixed, x_shape)
    y = Neg (back)
}}""",
        **{name: WEIGHTS[name] for name in ("router", "router_bias")},
        **{name: value for number in range(EXPERTS) for name, value in split(number, activation).items()},
        **CONSTANTS,
    )


def split(number: int, activation: str) -> dict[str, np.ndarray]:
    """Return the weights of one expert; gate and up are interleaved if the activation is clipped."""
    step, half = (slice(None, None, 2), slice(1, None, 2)), (slice(WIDTH), slice(WIDTH, None))
    gate, up = step if activation is EXPERT else half
    opens, bias = WEIGHTS["opens"][number], WEIGHTS["opens_bias"][number, 0]
    return {
        f"gate_w{number}": opens[:, gate],
        f"gate_b{number}": bias[gate],
        f"up_w{number}": opens[:, up],
        f"up_b{number}": bias[up],
        f"down_w{number}": WEIGHTS["closes"][number],
        f"down_b{number}": WEIGHTS["closes_bias"][number, 0],
    }


EXPERT = """gm# = MatMul (group#, gate_w#) ga# = Add (gm#, gate_b#) g# = Clip (ga#, , limit)
    scaled# = Mul (g#, alpha) s# = Sigmoid (scaled#) a# = Mul (g#, s#)
    um# = MatMul (group#, up_w#) ua# = Add (um#, up_b#) u# = Clip (ua#, lowest, limit)
    shifted# = Add (u#, beta) p# = Mul (a#, shifted#) dm# = MatMul (p#, down_w#) y# = Add (dm#, down_b#)
    """
PLAIN_EXPERT = """gm# = MatMul (group#, gate_w#) g# = Add (gm#, gate_b#) s# = Sigmoid (g#) a# = Mul (g#, s#)
    um# = MatMul (group#, up_w#) u# = Add (um#, up_b#)
    p# = Mul (a#, u#) dm# = MatMul (p#, down_w#) y# = Add (dm#, down_b#)
    """


@pytest.mark.parametrize(
    ("before", "expert"),
    [(dense(), EXPERT), (dense(HALVES, PLAIN), PLAIN_EXPERT)],
    ids=["interleaved, clipped", "halves"],
)
def test_dense_experts_become_sparse(before: ir.Model, expert: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, 7, HIDDEN)).astype(np.float32)
    expected = evaluate(before, {"x": x})[0]
    assert apply(FuseExpertsPass(), before) == []
    assert_same(before, canonical(expert))
    np.testing.assert_allclose(evaluate(before, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
    assert apply(FuseExpertsPass(), before) == []  # the canonical form stays


def test_a_softmax_over_all_scores_is_not_scaled_to_a_sum_of_one() -> None:
    before = dense(routing="likely = Softmax <axis = -1> (scores) shares, chosen = TopK (likely, two)")
    x = np.random.default_rng(1).standard_normal((2, 7, HIDDEN)).astype(np.float32)
    expected = evaluate(before, {"x": x})[0]
    assert apply(FuseExpertsPass(), before) == []
    assert not [node for node in before.graph if node.op_type == "ScatterElements"]
    np.testing.assert_allclose(evaluate(before, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


REFUSED = {
    "a Tanh": (dense(activation=CLIPPED.replace("Sigmoid", "Tanh")), "do not compute SiLU(gate) * up"),
    "a limit that differs": (
        dense(activation=CLIPPED.replace("Clip (up, lowest, limit)", "Clip (up, lowest, alpha)")),
        "do not compute SiLU(gate) * up",
    ),
    "the gate twice": (dense(HALVES, PLAIN.replace("(a, up)", "(a, a)")), "do not compute SiLU(gate) * up"),
    "shares that are scores": (
        dense(routing="shares, chosen = TopK (scores, two)"),
        "does not compute the mixture of the router's top experts",
    ),
    "the smallest scores": (
        dense(routing=CHOSEN.replace("TopK", "TopK <largest = 0>")),
        "does not compute the mixture of the router's top experts",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_another_computation_stays(case: str) -> None:
    model, reason = REFUSED[case]
    before = [node.op_type for node in model.graph]
    (refused,) = apply(FuseExpertsPass(), model)
    assert reason in refused
    assert [node.op_type for node in model.graph] == before
