"""All canonical passes on one graph in which each pass rewrites a node keep the results."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import evaluate, graph

from carryall.graph_opt.passes.base import pass_name
from carryall.graph_opt.pipeline.canonical import canonical_passes

W = 8
RNG = np.random.default_rng(7)


def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (0.3 * RNG.standard_normal(shape)).astype(np.float32)


GIVEN = {
    "embed": weight(12, W), "copy": np.zeros((W, 12), np.float32), "ups": weight(W, 2 * W),
    "down": weight(W, W), "gain": weight(W), "shift": weight(W), "turned": weight(W, W), "bias": weight(W),
    "two": np.float32(2), "one": np.float32(1), "half": np.float32(0.5), "root": np.float32(np.sqrt(2)),
    "eps": np.float32(1e-5), "last": np.array([-1]), "rows": np.array([-1, W]), "sizes": np.array([W, W]),
}  # fmt: skip
GIVEN["copy"] = np.ascontiguousarray(GIVEN["embed"].T)
BODY = """x = Gather(embed, input_ids) same = Identity(x)
    sq = Pow(same, two) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) un = Div(same, rt)
    scale = Add(gain, one) normed = Mul(scale, un)
    both = MatMul(normed, ups) gate, up = Split <axis = -1> (both, sizes)
    gd = Div(gate, root) ge = Erf(gd) gf = Add(ge, one) gp = Mul(gate, gf) act = Mul(gp, half)
    mixed = Mul(act, up) flat = Reshape(mixed, rows) p = Gemm(flat, down, bias) xs = Shape(x)
    out = Reshape(p, xs)
    sum = Add(out, x) mean = ReduceMean(sum, last) d = Sub(sum, mean) dq = Mul(d, d) v = ReduceMean(dq, last)
    ve = Add(v, eps) vr = Sqrt(ve) dn = Div(d, vr) ds = Mul(dn, scale) ln = Add(ds, shift)
    wt = Transpose <perm = [1, 0]> (turned) turnedup = MatMul(ln, wt)
    a, b, c, res = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (turnedup, sum, gain)
    fm = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (a, down) fin = Add(fm, res)
    logits = MatMul(fin, copy)"""
SHAPES = "".join(f", float[N, S, {W}] {name}" for name in ("same", "un", "turnedup", "sum", "a", "res", "d"))
TEXT = f"g (int64[N, S] input_ids) => (float[N, S, 12] logits) <float[N, S, 1] me{SHAPES}> {{ {BODY} }}"
EXPECTED_TO_FIRE = {
    "FoldConstants", "FoldTransposes", "FuseActivation", "FuseLayerNorm", "FuseRMSNorm", "GemmToMatMul",
    "LiftNorms", "LiftProducts", "SimplifyShapes", "SplitProjections", "TiedHead",
}  # fmt: skip


def reference(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The same computation in double precision."""
    g = {name: np.asarray(value, np.float64) for name, value in GIVEN.items()}
    erf = np.vectorize(math.erf)
    x = g["embed"][ids]
    normed = (g["gain"] + 1) * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    gate, up = np.split(normed @ g["ups"], 2, -1)
    total = (gate * (1 + erf(gate / np.sqrt(2))) / 2 * up) @ g["down"] + g["bias"] + x
    centred = total - total.mean(-1, keepdims=True)
    ln = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * (g["gain"] + 1) + g["shift"]
    res = ln @ g["turned"].T + total
    a = res / np.sqrt((res**2).mean(-1, keepdims=True) + 1e-5) * g["gain"]
    return np.asarray((0.5 * a @ g["down"].T + res) @ g["copy"])


@pytest.mark.parametrize("shape", [(1, 1), (2, 5)])
def test_all_rules_together_keep_the_numbers(shape: tuple[int, int]) -> None:
    model: ir.Model = graph(TEXT, **GIVEN)
    fired = set()
    for one in canonical_passes():
        one(model)
        if getattr(one, "fired", 0):
            fired.add(pass_name(one))
    assert fired >= EXPECTED_TO_FIRE
    assert {node.domain for node in model.graph} == {""}
    ids = RNG.integers(0, 12, shape)
    np.testing.assert_allclose(evaluate(model, {"input_ids": ids})[0], reference(ids), rtol=1e-5, atol=1e-5)
