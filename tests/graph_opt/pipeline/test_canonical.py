from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import evaluate

from carryall.graph_opt.pipeline.canonical import canonical_passes
from carryall.graph_opt.pipeline.pipeline import run

HEADS, KV_HEADS, SIZE = 4, 2, 16
WIDTH = HEADS * SIZE

SIGNATURE = """traced (int64[b, s] input_ids, int64[b, t] attention_mask, int64[b, s] position_ids,
    float[b, 2, p, 16] past_key, float[b, 2, p, 16] past_value) =>
    (float[b, s, 64] logits, float[b, 2, t, 16] present_key, float[b, 2, t, 16] present_value)"""


def traced(*, blocked: str = "-inf", sign: float = -1.0) -> ir.Model:
    """Return a layer of attention as in traces: computed shapes, decomposed rope and softmax."""

    def rotated(name: str) -> str:
        return f"""{name}a = Mul({name}, cos) {name}l = Slice({name}, i0, i8, i3)
            {name}r = Slice({name}, i8, far, i3) {name}n = Mul({name}r, sign)
            {name}c = Concat <axis = -1> ({name}n, {name}l) {name}b = Mul({name}c, sin)
            {name}o = Add({name}a, {name}b)"""

    def repeated(name: str, source: str) -> str:
        return f"""{name}s = Shape({source}) {name}0 = Gather <axis = 0> ({name}s, i0)
            {name}2 = Gather <axis = 0> ({name}s, i2) {name}u = Unsqueeze({source}, i2)
            {name}e = Concat <axis = 0> ({name}0, i2, i2, {name}2, i16) {name}x = Expand({name}u, {name}e)
            {name}w = Concat <axis = 0> ({name}0, i4, {name}2, i16) {name}h = Reshape({name}x, {name}w)"""

    body = f"""x = Gather <axis = 0> (embed, input_ids)
        shape = Shape(x) batch = Gather <axis = 0> (shape, i0) length = Gather <axis = 0> (shape, i1)
        target = Concat <axis = 0> (batch, length, minus, i16)
        pf = Cast <to = 1> (position_ids) pu = Unsqueeze(pf, i2) freqs = Mul(pu, inverse)
        angles = Concat <axis = -1> (freqs, freqs) c = Cos(angles) si = Sin(angles)
        cos = Unsqueeze(c, i1) sin = Unsqueeze(si, i1)
        q3 = MatMul(x, wq) q4 = Reshape(q3, target) q = Transpose <perm = [0, 2, 1, 3]> (q4) {rotated("q")}
        k3 = MatMul(x, wk) k4 = Reshape(k3, target) k = Transpose <perm = [0, 2, 1, 3]> (k4) {rotated("k")}
        v3 = MatMul(x, wv) v4 = Reshape(v3, target) v = Transpose <perm = [0, 2, 1, 3]> (v4)
        present_key = Concat <axis = -2> (past_key, ko)
        present_value = Concat <axis = -2> (past_value, v)
        {repeated("pk", "present_key")}
        {repeated("pv", "present_value")}
        ps = Shape(past_key) past = Gather <axis = 0> (ps, n2) ls = Gather <axis = 0> (shape, n1)
        total = Add(past, ls) rows = Range(past, total, n1) cols = Range(n0, total, n1)
        rows4 = Unsqueeze(rows, i1) causal = LessOrEqual(cols, rows4)
        real = Cast <to = 9> (attention_mask) real4 = Unsqueeze(real, i12) seen = And(causal, real4)
        mask = Where(seen, zero, blocked)
        qs = Mul(qo, root) kt = Transpose <perm = [0, 1, 3, 2]> (pkh) ks = Mul(kt, root)
        scores = MatMul(qs, ks) masked = Add(scores, mask) soft = Softmax <axis = -1> (masked)
        nan = IsNaN(soft) weights = Where(nan, zero, soft) y4 = MatMul(weights, pvh)
        yt = Transpose <perm = [0, 2, 1, 3]> (y4) joined = Concat <axis = 0> (batch, length, minus)
        y3 = Reshape(yt, joined) logits = MatMul(y3, wo)"""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    arrays = {
        "embed": weight(32, WIDTH),
        "wq": weight(WIDTH, WIDTH),
        "wk": weight(WIDTH, KV_HEADS * SIZE),
        "wv": weight(WIDTH, KV_HEADS * SIZE),
        "wo": weight(WIDTH, WIDTH),
        "inverse": (1e4 ** -(np.arange(SIZE // 2) / 8)).astype(np.float32),
        "root": np.float32(SIZE**-0.25),
        "zero": np.float32(0),
        "blocked": np.float32(blocked),
        "sign": np.float32(sign),
        "minus": np.array([-1]),
        "far": np.array([2**62]),
        "i12": np.array([1, 2]),
    }
    arrays |= {f"i{number}": np.array([number]) for number in (0, 1, 2, 3, 4, 8, 16)}
    arrays |= {f"n{number}": np.array(number) for number in (0, 1, 2)}
    tensors = [ir.tensor(np.asarray(array), name=name) for name, array in arrays.items()]
    return ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : 18]> {SIGNATURE} {{ {body} }}', initializers=tensors
    )


def feed(past: int, new: int, padding: int) -> dict[str, object]:
    rng = np.random.default_rng(1)
    mask = np.ones((2, past + new), np.int64)
    mask[1, :padding] = 0
    cache = rng.standard_normal((2, 2, KV_HEADS, past, SIZE)).astype(np.float32)
    return {
        "input_ids": rng.integers(0, 32, (2, new)),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, past:],
        "past_key": cache[0],
        "past_value": cache[1],
    }


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.mark.long
@pytest.mark.parametrize("blocked", ["-inf", "-3.4028235e38"])
def test_a_traced_attention_becomes_canonical(blocked: str) -> None:
    model, report = run(traced(blocked=blocked), canonical_passes(), debug=True)
    assert report.after["Attention"] == 1
    assert report.after["RotaryEmbedding"] == 2
    assert not operators(model) & {"Softmax", "IsNaN", "Expand"}
    attention = next(node for node in model.graph if node.op_type == "Attention")
    assert attention.attributes["scale"].as_float() == pytest.approx(SIZE**-0.5, rel=1e-6)
    assert [value.name for value in model.graph.outputs] == ["logits", "present_key", "present_value"]


@pytest.mark.parametrize(("past", "new", "padding"), [(0, 5, 0), (4, 1, 2), (3, 4, 1)])
def test_the_results_stay_the_same(past: int, new: int, padding: int) -> None:
    given = feed(past, new, padding)
    expected = evaluate(traced(), given)
    model, _ = run(traced(), canonical_passes())
    for found, wanted in zip(evaluate(model, given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_lookalike_of_a_rotation_is_refused_with_a_reason() -> None:
    model, report = run(traced(sign=1.0), canonical_passes(), debug=True)
    assert "RotaryEmbedding" not in operators(model)
    reasons = [
        refusal.reason for one in report.passes if one.name == "FuseRotary" for refusal in one.refusals
    ]
    assert reasons == ["the sum of products is not a rotation"] * 2
    assert "Attention" in operators(model)


def test_a_graph_of_no_decoder_stays_as_it_is() -> None:
    text = '<ir_version: 11, opset_import: ["" : 23]> g (float[N] x) => (float[N] y) { y = Exp(x) }'
    _, report = run(ir.from_onnx_text(text), canonical_passes(), debug=True)
    assert report.after == {"Exp": 1}
