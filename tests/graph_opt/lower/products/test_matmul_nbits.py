from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.lower.kernels import CPU, CUDA, Kernels
from carryall.graph_opt.lower.products.matmul_nbits import QuantizedWeightsPass

K, N, BLOCK = 32, 6, 16
RNG = np.random.default_rng(0)
SCALES = RNG.random((K // BLOCK, N)).astype(np.float32)
LINEAR = f"g (float[B, S, {K}] x) => (float[B, S, {N}] y)"
DEQUANTIZED = f"w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s)"
KERNEL = "com.microsoft.MatMulNBits <K = 32, N = 6, bits = {bits}, block_size = 16, accuracy_level = 4>"
Bytes = npt.NDArray[np.uint8]


def int4(values: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    return values.astype(ml_dtypes.int4)


def packed(unsigned: npt.NDArray[np.int64]) -> Bytes:
    """Return 4-bit values [K, N] in the kernel's layout, computed element by element."""
    result = np.zeros((N, K // BLOCK, BLOCK // 2), np.uint8)
    for k in range(K):
        for n in range(N):
            result[n, k // BLOCK, k % BLOCK // 2] |= int(unsigned[k, n]) << (4 * (k % 2))
    return result


VALUES = RNG.integers(-8, 8, (K, N))


def test_int4_weights_become_the_kernels_bytes() -> None:
    model = graph(f"{LINEAR} {{ {DEQUANTIZED} y = MatMul(x, w) }}", q=int4(VALUES), s=SCALES)
    assert apply(QuantizedWeightsPass(CPU), model) == []
    expected = graph(
        f"{LINEAR} {{ y = {KERNEL.format(bits=4)} (x, q, s) }}", q=packed(VALUES + 8), s=SCALES.T
    )
    assert_same(model, expected)


def test_an_odd_number_of_outputs_has_half_filled_bytes() -> None:
    narrow = LINEAR.replace(f"{N}] y", "3] y")
    model = graph(f"{narrow} {{ {DEQUANTIZED} y = MatMul(x, w) }}", q=int4(VALUES[:, :3]), s=SCALES[:, :3])
    assert apply(QuantizedWeightsPass(CPU), model) == []
    b = model.graph[0].inputs[1]
    assert b is not None
    assert b.const_value is not None
    np.testing.assert_array_equal(b.const_value.numpy(), packed(VALUES + 8)[:3])


def test_int8_weights_and_a_bias() -> None:
    values = RNG.integers(-128, 128, (K, N))
    bias = RNG.random(N).astype(np.float32)
    model = graph(
        f"{LINEAR} {{ {DEQUANTIZED} m = MatMul(x, w) y = Add(m, b) }}",
        q=values.astype(np.int8),
        s=SCALES,
        b=bias,
    )
    assert apply(QuantizedWeightsPass(CPU), model) == []
    rows = (values.T.reshape(N, K // BLOCK, BLOCK) + 128).astype(np.uint8)
    expected = graph(
        f"{LINEAR} {{ y = {KERNEL.format(bits=8)} (x, q, s, , , b) }}", q=rows, s=SCALES.T, b=bias
    )
    assert_same(model, expected)


def test_zero_points_are_packed_per_row() -> None:
    model = graph(
        f"{LINEAR} {{ {DEQUANTIZED.replace('(q, s)', '(q, s, z)')} y = MatMul(x, w) }}",
        q=(VALUES + 8).astype(ml_dtypes.uint4),
        s=SCALES,
        z=np.arange(12).reshape(2, 6).astype(ml_dtypes.uint4),
    )
    assert apply(QuantizedWeightsPass(CPU), model) == []
    points = np.array([[n | (n + 6) << 4] for n in range(N)], np.uint8)
    body = f"y = {KERNEL.format(bits=4)} (x, q, s, z)"
    assert_same(model, graph(f"{LINEAR} {{ {body} }}", q=packed(VALUES + 8), s=SCALES.T, z=points))


@pytest.mark.parametrize("bits", [4, 8])
def test_unsigned_weights_without_zero_points_get_zeros(bits: int) -> None:
    levels = VALUES + 8
    model = graph(
        f"{LINEAR} {{ {DEQUANTIZED} y = MatMul(x, w) }}",
        q=levels.astype(ml_dtypes.uint4 if bits == 4 else np.uint8),
        s=SCALES,
    )
    assert apply(QuantizedWeightsPass(CPU), model) == []
    rows = packed(levels) if bits == 4 else levels.T.reshape(N, K // BLOCK, BLOCK).astype(np.uint8)
    points = np.zeros((N, K // BLOCK * bits // 8), np.uint8)
    body = f"y = {KERNEL.format(bits=bits)} (x, q, s, z)"
    assert_same(model, graph(f"{LINEAR} {{ {body} }}", q=rows, s=SCALES.T, z=points))


TIED = f"""g (int64[B, S] input_ids, float[B, S, {K}] h) => (float[B, S, {K}] e, float[B, S, {N}] y) {{
    w = DequantizeLinear <axis = 1, block_size = {BLOCK}> (q, s) e = Gather(w, input_ids)
    m = Reshape(h, rows) n = Gemm <transB = 1> (m, w) y = Reshape(n, shape) }}"""


def test_an_embedding_and_its_tied_head_share_their_bytes() -> None:
    model = graph(TIED, q=int4(VALUES.T), s=SCALES.T, rows=np.array([-1, K]), shape=np.array([0, -1, N]))
    assert apply(QuantizedWeightsPass(CPU), model) == []
    body = f"""t = Unsqueeze(s, last)
        g = com.microsoft.GatherBlockQuantized
            <bits = 4, block_size = {BLOCK}, gather_axis = 0, quantize_axis = 2> (q, input_ids, t)
        e = Reshape(g, join) y = {KERNEL.format(bits=4)} (h, q, s)"""
    signature = TIED.split("{")[0]
    constants = {"last": np.array([-1]), "join": np.array([0, 0, K])}
    assert_same(model, graph(f"{signature} {{ {body} }}", q=packed(VALUES + 8), s=SCALES.T, **constants))
    kernels = [node for node in model.graph if node.domain]
    assert kernels[0].inputs[0] is kernels[1].inputs[1]


EMBEDDING = f"""g (int64[B, S] input_ids) => (float[B, S, {K}] e) {{
    w = DequantizeLinear <axis = 1, block_size = {BLOCK}> (q, s, z) e = Gather(w, input_ids) }}"""
POINTS = RNG.integers(0, 16, (N, K // BLOCK))


def test_zero_points_that_a_kernel_misreads_are_added_to_the_rows() -> None:
    """CUDA's GatherBlockQuantized reads 4-bit zero points without the padding of rows."""
    levels = (VALUES.T + 8).astype(ml_dtypes.uint4)
    model = graph(EMBEDDING, q=levels, s=SCALES.T, z=POINTS.astype(ml_dtypes.uint4))
    feed = {"input_ids": np.array([[0, 5, 2]])}
    (before,) = evaluate(model, feed)
    assert apply(QuantizedWeightsPass(CUDA), model) == []
    body = f"""t = Unsqueeze(s, last)
        g = com.microsoft.GatherBlockQuantized
            <bits = 4, block_size = {BLOCK}, gather_axis = 0, quantize_axis = 2> (q, input_ids, t)
        o = Gather <axis = 0> (offsets, input_ids) a = Add(g, o) e = Reshape(a, join)"""
    constants = {
        "last": np.array([-1]),
        "join": np.array([0, 0, K]),
        "offsets": ((8 - POINTS) * SCALES.T)[..., None].astype(np.float32),
    }
    signature = EMBEDDING.split("{")[0]
    assert_same(model, graph(f"{signature} {{ {body} }}", q=packed(VALUES + 8), s=SCALES.T, **constants))
    lowered = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    np.testing.assert_allclose(lowered.run(None, feed)[0], before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dequantized", "kernels", "reason"),
    [
        (
            DEQUANTIZED,
            dataclasses.replace(CPU, matmul_nbits=(8,)),
            "no MatMulNBits for 4 bits",
        ),
        (
            DEQUANTIZED.replace("axis = 0", "axis = 1").replace("= 16", "= 2"),
            CPU,
            "blocked along its outputs",
        ),
        (DEQUANTIZED.replace("(q, s)", "(q, s, z)"), CPU, "signed weights with zero points"),
    ],
    ids=["no kernel", "other axis", "signed with zero point"],
)
def test_weights_without_a_kernel_stay(dequantized: str, kernels: Kernels, reason: str) -> None:
    constants = {
        "q": int4(VALUES),
        "s": SCALES if "axis = 0" in dequantized else np.ones((K, 3), np.float32),
        "z": int4(np.ones((K // BLOCK, N), np.int64)),
    }
    model = graph(f"{LINEAR} {{ {dequantized} y = MatMul(x, w) }}", **constants)
    (refusal,) = apply(QuantizedWeightsPass(kernels), model)
    assert reason in refusal
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul"]


def test_a_computed_weight_is_not_refused() -> None:
    model = graph("g (float[B, 4, 4] x) => (float[B, 4, 4] y) { y = MatMul(x, x) }")
    assert apply(QuantizedWeightsPass(CPU), model) == []


def test_a_level_of_zero_leaves_the_accuracy_to_the_target() -> None:
    model = graph(f"{LINEAR} {{ {DEQUANTIZED} y = MatMul(x, w) }}", q=int4(VALUES), s=SCALES)
    apply(QuantizedWeightsPass(dataclasses.replace(CPU, accuracy_level=0)), model)
    assert "accuracy_level" not in model.graph[0].attributes
    assert isinstance(model.graph[0], ir.Node)
