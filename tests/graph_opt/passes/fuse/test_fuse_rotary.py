from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph
from onnx_ir.passes import common

from carryall.graph_opt.passes.fuse.fuse_rotary import FuseRotaryPass

H, D = 3, 8
GIVEN = {
    "f8": (1e4 ** -(np.arange(4) / 4)).astype(np.float32),
    "f4": (1e4 ** -(np.arange(2) / 2)).astype(np.float32),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i2": np.array([2]),
    "i3": np.array([3]),
    "i4": np.array([4]),
    "last": np.array([-1]),
    "far": np.array([99]),
    "whole": np.array([0, 0, 0, -1]),
    "doubled": np.array([1, 1, 1, 2]),
}
SIGNATURE = f"""g (int64[N, S] position_ids, float[N, {H}, S, {D}] x) => (float[N, {H}, S, {D}] y)
    <float[N, 1, S, {D}] cos, float[N, 1, S, {D}] sin, float[N, {H}, S, 8] r,
     float[N, 1, S, 4] cosp, float[N, 1, S, 4] sinp, float[N, {H}, S, 4] xp, float[N, {H}, S, 4] rp>"""
ANGLES = "p = Cast <to = 1> (position_ids) u = Unsqueeze(p, last) a = Mul(u, f8)"
HALVES = f"""{ANGLES} t = Concat <axis = -1> (a, a) c = Cos(t) s = Sin(t)
    cos = Unsqueeze(c, i1) sin = Unsqueeze(s, i1)
    left = Slice(x, i0, i4, i3) right = Slice(x, i4, far, i3) n = Neg(right)
    r = Concat <axis = -1> (n, left) xc = Mul(x, cos) rs = Mul(r, sin) y = Add(xc, rs)"""
PAIRS = f"""{ANGLES} au = Unsqueeze(a, last) ax = Tile(au, doubled) at = Reshape(ax, flat3)
    c = Cos(at) s = Sin(at) cos = Unsqueeze(c, i1) sin = Unsqueeze(s, i1)
    even = Slice(x, i0, far, i3, i2) odd = Slice(x, i1, far, i3, i2) n = Neg(odd)
    nu = Unsqueeze(n, last) eu = Unsqueeze(even, last) st = Concat <axis = -1> (nu, eu)
    r = Reshape(st, shape4)
    xc = Mul(x, cos) rs = Mul(r, sin) y = Add(xc, rs)"""
PARTIAL = """p = Cast <to = 1> (position_ids) u = Unsqueeze(p, last) a = Mul(u, f4)
    t = Concat <axis = -1> (a, a) c = Cos(t) s = Sin(t) cosp = Unsqueeze(c, i1) sinp = Unsqueeze(s, i1)
    xp = Slice(x, i0, i4, i3) pass = Slice(x, i4, far, i3)
    left = Slice(xp, i0, i2, i3) right = Slice(xp, i2, far, i3) n = Neg(right)
    rp = Concat <axis = -1> (n, left) xc = Mul(xp, cosp) rs = Mul(rp, sinp) z = Add(xc, rs)
    y = Concat <axis = -1> (z, pass)"""

# transformers' gpt-oss: tables of half the width; the halves of x are rotated apart
PARTS = f"""{ANGLES} c = Cos(a) s = Sin(a) cosp = Unsqueeze(c, i1) sinp = Unsqueeze(s, i1)
    left = Slice(x, i0, i4, i3) right = Slice(x, i4, far, i3)
    lc = Mul(left, cosp) rs = Mul(sinp, right) first = Sub(lc, rs)
    rc = Mul(right, cosp) ls = Mul(left, sinp) second = Add(rc, ls)
    y = Concat <axis = -1> (first, second)"""
PARTIAL_PARTS = """p = Cast <to = 1> (position_ids) u = Unsqueeze(p, last) a = Mul(u, f4)
    c = Cos(a) s = Sin(a) cos2 = Unsqueeze(c, i1) sin2 = Unsqueeze(s, i1)
    xp = Slice(x, i0, i4, i3) pass = Slice(x, i4, far, i3)
    left, right = Split <axis = 3, num_outputs = 2> (xp)
    lc = Mul(left, cos2) rs = Mul(right, sin2) first = Sub(lc, rs)
    rc = Mul(right, cos2) ls = Mul(left, sin2) second = Add(rc, ls)
    z = Concat <axis = -1> (first, second) y = Concat <axis = -1> (z, pass)"""


def traced(body: str) -> ir.Model:
    given = GIVEN | {"flat3": np.array([0, 0, D]), "shape4": np.array([0, H, -1, D])}
    model = graph(f"{SIGNATURE} {{ {body} }}", **given)
    common.ShapeInferencePass()(model)
    return model


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (HALVES, {"interleaved": 0}),
        (PAIRS, {"interleaved": 1}),
        (PARTIAL, {"interleaved": 0, "rotary_embedding_dim": 4}),
        (PARTS, {"interleaved": 0}),
        (PARTIAL_PARTS, {"interleaved": 0, "rotary_embedding_dim": 4}),
    ],
    ids=["halves", "interleaved", "partial", "parts", "partial parts"],
)
def test_every_written_form(body: str, expected: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    feed = {
        "position_ids": np.array([[3, 4], [9, 2]]),
        "x": rng.standard_normal((2, H, 2, D)).astype(np.float32),
    }
    model = traced(body)
    assert apply(FuseRotaryPass(), model) == []
    node = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    found = {name: attribute.as_int() for name, attribute in node.attributes.items()}
    assert found == expected | {"num_heads": H}
    np.testing.assert_allclose(
        evaluate(model, feed)[0], evaluate(traced(body), feed)[0], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (HALVES.replace("Neg(right)", "Identity(right)"), "the sum of products is not a rotation"),
        (PARTS.replace("Sub(lc, rs)", "Sub(rs, lc)"), "the sum of products is not a rotation"),
        (
            HALVES.replace("(a, a)", "(a, twofold)").replace(
                "a = Mul(u, f8)", "a = Mul(u, f8) twofold = Add(a, a)"
            ),
            "the two halves of cos or sin differ",
        ),
    ],
    ids=["no sign", "parts of another sign", "halves turned by different angles"],
)
def test_lookalikes_of_rotations_are_refused_with_a_reason(body: str, reason: str) -> None:
    assert apply(FuseRotaryPass(), traced(body)) == [reason]


# transformers' GPT-J and CodeGen: heads behind the sequence, sin and cos beside each other in a table
HEADS_BEHIND = f"""g (int64[N, S] position_ids, float[N, S, {H}, {D}] x) => (float[N, S, {H}, {D}] y)
    <float[N, S, 1, 4] cos, float[N, S, 1, 4] sin, float[N, S, {H}, 4] xp, float[N, S, {H}, 4] r> {{
    both = Gather <axis = 0> (table, position_ids) s, c = Split <axis = -1, num_outputs = 2> (both)
    s3 = Unsqueeze(s, i2) s4 = Unsqueeze(s3, last) s5 = Tile(s4, twice) sin = Reshape(s5, one_head)
    c3 = Unsqueeze(c, i2) c4 = Unsqueeze(c3, last) c5 = Tile(c4, twice) cos = Reshape(c5, one_head)
    xp = Slice(x, i0, i4, i3) pass = Slice(x, i4, far, i3)
    even = Slice(xp, i0, far, i3, i2) odd = Slice(xp, i1, far, i3, i2) n = Neg(odd)
    nu = Unsqueeze(n, last) eu = Unsqueeze(even, last) st = Concat <axis = -1> (nu, eu)
    r = Reshape(st, heads)
    xc = Mul(xp, cos) rs = Mul(r, sin) z = Add(xc, rs) y = Concat <axis = -1> (z, pass) }}"""


@pytest.mark.parametrize("positions", [16, 300])
def test_heads_behind_the_sequence_and_angles_from_a_short_table(positions: int) -> None:
    angles = np.arange(positions)[:, None] * GIVEN["f4"]
    given = GIVEN | {
        "table": np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32),
        "twice": np.array([1, 1, 1, 1, 2]),
        "one_head": np.array([0, 0, 1, 4]),
        "heads": np.array([0, 0, H, 4]),
    }
    feed = {
        "position_ids": np.array([[3, 4, 15], [9, 2, 0]]),
        "x": np.random.default_rng(0).standard_normal((2, 3, H, D)).astype(np.float32),
    }
    model = graph(HEADS_BEHIND, **given)
    common.ShapeInferencePass()(model)
    assert apply(FuseRotaryPass(), model) == []
    node = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    found = {name: attribute.as_int() for name, attribute in node.attributes.items()}
    assert found == {"interleaved": 1, "num_heads": H, "rotary_embedding_dim": 4}
    np.testing.assert_allclose(
        evaluate(model, feed)[0], evaluate(graph(HEADS_BEHIND, **given), feed)[0], rtol=1e-6, atol=1e-6
    )
