from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.lower.norms.branchwise_norms import BranchwiseNormsPass

H, KV, D = 4, 2, 16
GIVEN = {
    "w": (0.3 * np.random.default_rng(0).standard_normal((8, (H + 2 * KV) * D))).astype(np.float32),
    "sizes": np.array([H * D, KV * D, KV * D]),
    "nq": np.linspace(0.5, 2, D).astype(np.float32),
    "nk": np.linspace(2, 0.5, D).astype(np.float32),
    "q4": np.array([0, 0, H, D]),
    "k4": np.array([0, 0, KV, D]),
    "q3": np.array([0, 0, H * D]),
    "k3": np.array([0, 0, KV * D]),
}
TEXT = f"""g (float[b, s, 8] x, int32[b] lengths, int32 total,
    float[b, {KV}, m, {D}] pk, float[b, {KV}, m, {D}] pv) => (float[b, s, {H * D}] y)
    <float[b, s, {KV * D}] v> {{
    p = MatMul(x, w) q, k, v = Split <axis = -1> (p, sizes)
    qh = Reshape(q, q4) qn = RMSNormalization <axis = -1, epsilon = 1e-6> (qh, nq) qf = Reshape(qn, q3)
    kh = Reshape(k, k4) kn = RMSNormalization <axis = -1, epsilon = 1e-6> (kh, nk) kf = Reshape(kn, k3)
    y, a, c = com.microsoft.GroupQueryAttention <num_heads = {H}, kv_num_heads = {KV}>
        (qf, kf, v, pk, pv, lengths, total) }}"""


def result(model: ir.Model, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    ort = pytest.importorskip("onnxruntime")
    ir.save(model, path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    cache = np.zeros((1, KV, 8, D), np.float32)
    x = np.random.default_rng(1).standard_normal((1, 3, 8)).astype(np.float32)
    feed = {"x": x, "lengths": np.array([2], np.int32), "total": np.array(3, np.int32)}
    feed |= {"pk": cache, "pv": cache}
    return np.asarray(session.run(["y"], feed)[0], np.float32)


def test_heads_are_normalised_without_reshapes(tmp_path: Path) -> None:
    model = graph(TEXT, **GIVEN)
    assert apply(BranchwiseNormsPass(), model) == []
    kinds = [node.op_type for node in model.graph]
    assert kinds == ["MatMul", "Split", "BranchwiseRMSNorm", "BranchwiseRMSNorm", "GroupQueryAttention"]
    expected = result(graph(TEXT, **GIVEN), tmp_path / "a.onnx")
    np.testing.assert_allclose(result(model, tmp_path / "b.onnx"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (("q3", np.array([0, 0, H, D])), "its output is not reshaped to [batch, sequence, heads * head_dim]"),
        (("nq", np.ones((H, D), np.float32)), "its scale is not a vector"),
        (
            ("q4", np.array([0, 0, H // 2, 2 * D])),
            "its input is not reshaped to [batch, sequence, heads, head_dim]",
        ),
    ],
)
def test_other_norms_stay(
    changed: tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]], reason: str
) -> None:
    name, content = changed
    model = graph(TEXT, **GIVEN | {name: content})
    assert apply(BranchwiseNormsPass(), model) == [reason]
    assert "RMSNormalization" in [node.op_type for node in model.graph]
