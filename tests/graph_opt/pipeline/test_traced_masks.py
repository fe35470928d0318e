"""Traces whose masks are cut from tables by the lengths of queries and keys give equal results.

The graphs are ours, in the form in which torch traces GPT-Neo (scores are not scaled; a table may
hold a window) and MPT (ALiBi). Their attention is not fused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graph_asserts import graph

import carryall

H, D, V, LONGEST = 2, 4, 16, 32
RNG = np.random.default_rng(0)
CAUSAL = np.tril(np.ones((1, 1, LONGEST, LONGEST), np.bool_))
LOCAL = CAUSAL & np.triu(np.ones((LONGEST, LONGEST), np.bool_), -3)
SLOPES = np.array([0.25, 0.0625]).reshape(1, H, 1, 1)
GIVEN: dict[str, npt.NDArray[np.generic]] = {
    name: RNG.standard_normal(shape).astype(np.float32)
    for name, shape in (
        ("embed", (V, H * D)),
        *((name, (H * D, H * D)) for name in ("wq", "wk", "wv", "wo")),
        ("head", (H * D, V)),
    )
} | {
    "heads": np.array([0, 0, H, D]),
    "joined": np.array([0, 0, H * D]),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i2": np.array([2]),
    "i3": np.array([3]),
    "longest": np.array([LONGEST]),
    "one": np.array(1, np.float32),
    "scale": np.array(D**-0.5, np.float32),
    "low": np.array(-3.4e38, np.float32),
    "alibi": (SLOPES * np.arange(1 - LONGEST, 1)).astype(np.float32),
}
NAMES = {
    "pk": "past_key_values.0.key",
    "pv": "past_key_values.0.value",
    "nk": "present.0.key",
    "nv": "present.0.value",
}
SIGNATURE = f"""g (int64[N, S] input_ids, int64[N, T] attention_mask, float[N, {H}, P, {D}] pk,
     float[N, {H}, P, {D}] pv)
    => (float[N, S, {V}] logits, float[N, {H}, T, {D}] nk, float[N, {H}, T, {D}] nv)"""
PROJECTIONS = """x = Gather <axis = 0> (embed, input_ids)
    q0 = MatMul(x, wq) q1 = Reshape(q0, heads) q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul(x, wk) k1 = Reshape(k0, heads) k = Transpose <perm = [0, 2, 1, 3]> (k1)
    v0 = MatMul(x, wv) v1 = Reshape(v0, heads) v = Transpose <perm = [0, 2, 1, 3]> (v1)
    nk = Concat <axis = 2> (pk, k)
    nv = Concat <axis = 2> (pv, v)
    turned = Transpose <perm = [0, 1, 3, 2]> (nk) scores = MatMul(q, turned)
    all = Shape <start = 2, end = 3> (nk) new = Shape <start = 2, end = 3> (q) first = Sub(all, new)
    rows = Slice(table, first, all, i2) seen = Slice(rows, i0, all, i3)"""
PADDING = """m0 = Cast <to = 1> (attention_mask) m1 = Sub(one, m0) m2 = Mul(m1, low)
    m3 = Unsqueeze(m2, i1) m4 = Unsqueeze(m3, i1)"""
END = """p = Softmax <axis = -1> (masked) o = MatMul(p, nv)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o) o2 = Reshape(o1, joined) o3 = MatMul(o2, wo) o4 = Add(o3, x)
    logits = MatMul(o4, head)"""
NEO = f"{PROJECTIONS} visible = Where(seen, scores, low) {PADDING} masked = Add(visible, m4) {END}"
MPT = f"""{PROJECTIONS} scaled = Mul(scores, scale) from = Sub(longest, all)
    bias = Slice(alibi, from, longest, i3) biased = Add(scaled, bias) visible = Where(seen, biased, low)
    {PADDING} masked = Add(visible, m4) {END}"""


def results(path: Path, tokens: list[int], past: int) -> list[npt.NDArray[np.float32]]:
    """Run two rows, the second with two tokens of padding."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng, mask = np.random.default_rng(1), np.ones((2, past + len(tokens)), np.int64)
    mask[1, :2] = 0
    feed: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": np.array([tokens, tokens[::-1]]),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:],
    }
    for name in (NAMES["pk"], NAMES["pv"]):
        feed[name] = rng.standard_normal((2, H, past, D)).astype(np.float32)
    known = {value.name for value in session.get_inputs()}
    found = session.run(None, {name: array for name, array in feed.items() if name in known})
    return [np.asarray(array) for array in found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "table"),
    [(NEO, CAUSAL), (NEO, LOCAL), (MPT, CAUSAL)],
    ids=["GPT-Neo", "a window of GPT-Neo", "MPT"],
)
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_results_are_the_sources(
    body: str, table: npt.NDArray[np.bool_], target: str, tmp_path: Path
) -> None:
    model = graph(f"{SIGNATURE} {{ {body} }}", **GIVEN, table=table)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = NAMES.get(str(value.name), value.name)
    source, changed = tmp_path / "a.onnx", tmp_path / "b.onnx"
    ir.save(model, source)
    carryall.optimize(source, changed, target=target, context_length=LONGEST, verify=True)
    if target == "portable":
        for tokens, past in (([3, 1, 4, 1, 5], 0), ([9], 7), ([2, 6, 5], 20)):
            for found, wanted in zip(
                results(changed, tokens, past), results(source, tokens, past), strict=True
            ):
                real = np.ones(found.shape[0], np.bool_) if past > 2 else np.array([True, False])
                np.testing.assert_allclose(found[real], wanted[real], rtol=1e-5, atol=1e-5)
