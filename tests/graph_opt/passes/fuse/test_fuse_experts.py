"""Mixtures of experts of traces are rewritten to the canonical form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.experts.mixture import Mixture, find_mixture
from carryall.graph_opt.passes.fuse.fuse_experts import FuseExpertsPass

HIDDEN, WIDTH, EXPERTS = 8, 6, 4
RNG = np.random.default_rng(0)
SIZES = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
WEIGHTS = {
    f"{name}{expert}": RNG.standard_normal(size).astype(np.float32)
    for expert in range(EXPERTS)
    for name, size in SIZES.items()
} | {"router": RNG.standard_normal((HIDDEN, EXPERTS)).astype(np.float32)}
STACKS = {
    "opens": np.stack([np.hstack([WEIGHTS[f"gate{e}"], WEIGHTS[f"up{e}"]]).T for e in range(EXPERTS)]),
    "turns": np.stack([np.stack([WEIGHTS[f"gate{e}"], WEIGHTS[f"up{e}"]], -1) for e in range(EXPERTS)]),
    "closes": np.stack([WEIGHTS[f"down{e}"].T for e in range(EXPERTS)]),
    "closes_rows": np.stack([WEIGHTS[f"down{e}"] for e in range(EXPERTS)]),
}
STACKS["turns"] = STACKS["turns"].reshape(EXPERTS, HIDDEN, 2 * WIDTH)
CONSTANTS: dict[str, npt.NDArray[Any]] = {
    "two": np.array([2]),
    "last": np.array([-1]),
    "first": np.array([0]),
    "flat": np.array([-1, HIDDEN]),
    "count": np.array(EXPERTS),
    "off_on": np.array([0, 1]),
    "column": np.array([1]),
    "nothing": np.array(0, np.float32),
    "alpha": np.array(1.7, np.float32),
    "beta": np.array(1, np.float32),
    "limit": np.array(2, np.float32),
    "lowest": np.array(-2, np.float32),
    "turn_biases": RNG.standard_normal((EXPERTS, 2 * WIDTH)).astype(np.float32),
    "close_biases": RNG.standard_normal((EXPERTS, HIDDEN)).astype(np.float32),
    "shared_gate": RNG.standard_normal((HIDDEN, 1)).astype(np.float32),
    **{f"n{expert}": np.array(expert) for expert in range(EXPERTS)},
}
NORMALIZE = """total = ReduceSum(best, last)
    shares = Div(best, total)"""


def expert(number: int, x: str) -> str:
    return f"""g{number} = MatMul({x}, gate{number})
    s{number} = Sigmoid(g{number})
    a{number} = Mul(g{number}, s{number})
    u{number} = MatMul({x}, up{number})
    p{number} = Mul(a{number}, u{number})
    y{number} = MatMul(p{number}, down{number})"""


def dense(
    shares: str = NORMALIZE, order: tuple[int, ...] = (0, 1, 2, 3), after: str = "y = Neg(sum3)"
) -> ir.Model:
    """Return a mixture in which every expert computes every token, as mobius writes it."""
    parts = []
    for place, number in enumerate(order):
        added = f"sum{place} = Add(sum{place - 1}, w{place})" if place else "sum0 = Identity(w0)"
        parts.append(f"""{expert(number, "x")}
    is{place} = Equal(chosen, n{place})
    as{place} = Cast<to = 1>(is{place})
    hers{place} = Mul(shares, as{place})
    share{place} = ReduceSum(hers{place}, last)
    w{place} = Mul(y{number}, share{place})
    {added}""")
    body = "\n    ".join(parts)
    return graph(
        f"""g (float[batch, sequence, {HIDDEN}] x) => (float[batch, sequence, {HIDDEN}] y) {{
    scores = MatMul(x, router)
    likely = Softmax<axis = -1>(scores)
    best, chosen = TopK(likely, two)
    {shares}
    {body}
    {after}
}}""",
        **CONSTANTS,
        **WEIGHTS,
    )


def gathered() -> ir.Model:
    """Return a mixture that gathers each expert's tokens and adds in place, as TorchScript traces do."""
    parts = ["sum = Expand(nothing, shape)"]
    total = "sum"
    for number in range(EXPERTS):
        parts.append(f"""mine{number} = Gather<axis = 0>(by_expert, n{number})
    where{number} = NonZero(mine{number})
    slot{number}, token{number} = Split<axis = 0, num_outputs = 2>(where{number})
    row{number} = Squeeze(token{number}, first)
    x{number} = Gather<axis = 0>(tokens, row{number})
    {expert(number, f"x{number}")}
    pair{number} = Concat<axis = 0>(token{number}, slot{number})
    place{number} = Transpose(pair{number})
    share{number} = GatherND(shares, place{number})
    part{number} = Unsqueeze(share{number}, last)
    w{number} = Mul(y{number}, part{number})
    at{number} = Unsqueeze(row{number}, column)
    sum{number} = ScatterND<reduction = "add">({total}, at{number}, w{number})""")
        total = f"sum{number}"
    body = "\n    ".join(parts)
    return graph(
        f"""g (float[batch, sequence, {HIDDEN}] x) => (float[batch, sequence, {HIDDEN}] y) {{
    tokens = Reshape(x, flat)
    scores = MatMul(tokens, router)
    likely = Softmax<axis = -1>(scores)
    best, chosen = TopK(likely, two)
    {NORMALIZE}
    hot = OneHot(chosen, count, off_on)
    by_expert = Transpose<perm = [2, 1, 0]>(hot)
    shape = Shape(tokens)
    {body}
    x_shape = Shape(x)
    back = Reshape({total}, x_shape)
    y = Neg(back)
}}""",
        **CONSTANTS,
        **WEIGHTS,
    )


COLUMNS = """w = GatherND(opens, id)
    upright = Unsqueeze(copies, last)
    product = MatMul(w, upright)
    opened = Squeeze(product, last)
    g, u = Split<axis = 1, num_outputs = 2>(opened)
    s = Sigmoid(g)
    a = Mul(g, s)
    p = Mul(a, u)
    closing = GatherND(closes, id)
    inner = Unsqueeze(p, last)
    closed = MatMul(closing, inner)
    results = Squeeze(closed, last)"""
ROWS = """w = Gather(turns, ids)
    line = Unsqueeze(copies, column)
    product = MatMul(line, w)
    opened = Reshape(product, pairs)
    gates, ups = Split<axis = 2, num_outputs = 2>(opened)
    g = Squeeze(gates, two)
    u = Squeeze(ups, two)
    s = Sigmoid(g)
    a = Mul(g, s)
    p = Mul(a, u)
    closing = Gather(closes_rows, ids)
    inner = Unsqueeze(p, column)
    closed = MatMul(inner, closing)
    results = Squeeze(closed, column)"""

# gpt-oss of transformers 5: biases are gathered too, gate and up are clipped
BIASED = """w = GatherND(turns, id)
    line = Unsqueeze(copies, column)
    product = MatMul(line, w)
    plain = Squeeze(product, column)
    bias = GatherND(turn_biases, id)
    opened = Add(plain, bias)
    apart2 = Reshape(opened, pairs)
    gates, ups = Split<axis = 2, num_outputs = 2>(apart2)
    g = Squeeze(gates, two)
    u = Squeeze(ups, two)
    gc = Clip(g, , limit)
    uc = Clip(u, lowest, limit)
    scaled = Mul(gc, alpha)
    s = Sigmoid(scaled)
    a = Mul(gc, s)
    shifted = Add(uc, beta)
    p = Mul(shifted, a)
    closing = GatherND(closes_rows, id)
    inner = Unsqueeze(p, column)
    closed = MatMul(inner, closing)
    narrow = Squeeze(closed, column)
    close_bias = GatherND(close_biases, id)
    results = Add(narrow, close_bias)"""


def stacked(experts: str = COLUMNS) -> ir.Model:
    """Return a mixture that multiplies each token with its expert's matrices, as torch.export writes."""
    return graph(
        f"""g (float[batch, sequence, {HIDDEN}] x) => (float[batch, sequence, {HIDDEN}] y) {{
    tokens = Reshape(x, flat)
    scores = Gemm<transB = 1>(tokens, router_rows)
    likely = Softmax<axis = -1>(scores)
    best, chosen = TopK(likely, two)
    {NORMALIZE}
    apart = Unsqueeze(tokens, column)
    twice = Expand(apart, doubled)
    copies = Reshape(twice, flat)
    ids = Reshape(chosen, last)
    id = Unsqueeze(ids, last)
    {experts}
    hers = Reshape(shares, last)
    share = Unsqueeze(hers, last)
    weighed = Mul(results, share)
    of_token = Reshape(weighed, by_token)
    sum = ReduceSum<keepdims = 0>(of_token, column)
    shape = Shape(x)
    back = Reshape(sum, shape)
    y = Neg(back)
}}""",
        router_rows=WEIGHTS["router"].T,
        doubled=np.array([1, 2, 1]),
        by_token=np.array([-1, 2, HIDDEN]),
        pairs=np.array([-1, WIDTH, 2]),
        **CONSTANTS,
        **STACKS,
    )


def mixtures(model: ir.Model) -> list[Mixture]:
    found = [find_mixture(node) for node in model.graph if node.op_type == "Split"]
    return [one for one in found if isinstance(one, Mixture)]


@pytest.mark.parametrize(
    ("model", "normalize"),
    [
        (dense(), True),
        (dense("shares = Identity(best)"), False),
        (gathered(), True),
        (stacked(), True),
        (stacked(ROWS), True),
        (stacked(BIASED), True),
    ],
    ids=["dense", "dense-unnormalized", "gathered", "stacked", "stacked-transposed", "stacked-biased"],
)
def test_a_trace_becomes_the_canonical_form(model: ir.Model, normalize: bool) -> None:
    x = np.random.default_rng(1).standard_normal((2, 7, HIDDEN)).astype(np.float32)
    expected = evaluate(model, {"x": x})[0]
    assert apply(FuseExpertsPass(), model) == []
    (found,) = mixtures(model)
    assert found.router is not None
    assert (found.per_token, found.router.normalize, len(found.experts)) == (2, normalize, EXPERTS)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["MatMul"] + counts["Gemm"] == 3 * EXPERTS + 2
    assert not {"Equal", "NonZero", "ScatterND", "GatherND"} & set(counts)
    np.testing.assert_allclose(evaluate(model, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
    assert apply(FuseExpertsPass(), model) == []  # the canonical form stays
    assert len(mixtures(model)) == 1


def test_a_shared_expert_stays_separate() -> None:
    shared = """gs = MatMul(x, gate0)
    ss = Sigmoid(gs)
    as = Mul(gs, ss)
    us = MatMul(x, up0)
    ps = Mul(as, us)
    ys = MatMul(ps, down0)
    gate = MatMul(x, shared_gate)
    open = Sigmoid(gate)
    shared = Mul(open, ys)
    y = Add(sum3, shared)"""
    model = dense(after=shared)
    x = np.random.default_rng(1).standard_normal((1, 3, HIDDEN)).astype(np.float32)
    expected = evaluate(model, {"x": x})[0]
    assert apply(FuseExpertsPass(), model) == []
    assert len(mixtures(model)[0].experts) == EXPERTS
    np.testing.assert_allclose(evaluate(model, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (dense("shares = Sqrt(best)"), "does not compute the mixture of the router's top experts"),
        (dense(order=(0, 1, 2), after="y = Neg(sum2)"), "it combines 3 experts, but its router scores 4"),
        (stacked(COLUMNS.replace("Sigmoid", "Tanh")), r"do not compute SiLU(gate) * up"),
        (stacked(COLUMNS.replace("Mul(a, u)", "Mul(a, a)")), r"do not compute SiLU(gate) * up"),
        (
            stacked(
                COLUMNS.replace("GatherND(closes, id)", "GatherND(closes, other)").replace(
                    "w = ", "three = Sub(count, column) other = Sub(three, id) w = "
                )
            ),
            "its projections or their biases use different expert ids",
        ),
        (
            stacked(
                BIASED.replace("GatherND(close_biases, id)", "GatherND(close_biases, other)").replace(
                    "w = ", "three = Sub(count, column) other = Sub(three, id) w = ", 1
                )
            ),
            "its projections or their biases use different expert ids",
        ),
    ],
)
def test_a_different_mixture_is_not_fused(model: ir.Model, reason: str) -> None:
    before = [node.op_type for node in model.graph]
    refused = apply(FuseExpertsPass(), model)
    assert len(refused) == 1
    assert reason in refused[0]
    assert [node.op_type for node in model.graph] == before


def test_a_topk_without_router_weights_is_not_a_router() -> None:
    text = """g (float[n, 4] x) => (float[n, 2] best, int64[n, 2] chosen) {
    likely = Softmax(x)
    best, chosen = TopK(likely, two)
}"""
    assert apply(FuseExpertsPass(), graph(text, two=np.array([2]))) == []
