"""Lowering to carryall's own kernels: the tiles hold the numbers of the portable graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from decoded_tiles import attributes, decoded
from graph_asserts import apply, graph

from carryall.graph_opt.graph.edit import weight
from carryall.graph_opt.graph.lazy import STORED
from carryall.graph_opt.lower.kernels import StoredForm
from carryall.graph_opt.lower.products.quantized_linear import QuantizedLinearPass
from carryall.graph_opt.lower.products.stored_tiles import stored_tile_bytes
from carryall.storage.stored_tensor import StoredBlocks, StoredRows

K, N, BLOCK = 48, 22, 16
RNG = np.random.default_rng(0)
SCALES = RNG.uniform(0.1, 1, (K // BLOCK, N)).astype(np.float32)
POINTS = RNG.integers(0, 16, (K // BLOCK, N))
VALUES = RNG.integers(0, 16, (K, N))
LINEAR = f"g (float[B, S, {K}] x) => (float[B, S, {N}] y)"
DEQUANTIZED = f"w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s)"
Arrays = dict[str, npt.NDArray[Any]]


def spread(factors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.repeat(factors, BLOCK, axis=0)


PRODUCTS: dict[str, tuple[str, Arrays, npt.NDArray[Any], int]] = {
    "int4": (DEQUANTIZED, {"q": (VALUES - 8).astype(ml_dtypes.int4), "s": SCALES}, VALUES - 8.0, 0),
    "int8": (DEQUANTIZED, {"q": (VALUES * 9 - 128).astype(np.int8), "s": SCALES}, VALUES * 9 - 128.0, 0),
    "uint4": (
        DEQUANTIZED.replace("s)", "s, z)"),
        {"q": VALUES.astype(ml_dtypes.uint4), "s": SCALES, "z": POINTS.astype(ml_dtypes.uint4)},
        VALUES - spread(POINTS),
        1,
    ),
    "uint8": (
        DEQUANTIZED.replace("s)", "s, z)"),
        {"q": (VALUES * 16).astype(np.uint8), "s": SCALES, "z": (POINTS * 16).astype(np.uint8)},
        (VALUES - spread(POINTS)) * 16,
        1,
    ),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_keep_their_weights(kind: str) -> None:
    text, arrays, centred, offsets = PRODUCTS[kind]
    model = graph(f"{LINEAR} {{ {text} y = MatMul(x, w) }}", **arrays)
    assert apply(QuantizedLinearPass(), model) == []
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("carryall", "QuantizedLinear")
    assert attributes(node)["offsets"] == offsets
    np.testing.assert_array_equal(decoded(node), (centred * spread(SCALES)).T.astype(np.float32))


def test_a_bias_is_an_operand() -> None:
    bias = RNG.standard_normal(N).astype(np.float32)
    model = graph(
        f"{LINEAR} {{ {DEQUANTIZED} p = MatMul(x, w) y = Add(p, b) }}",
        **PRODUCTS["int4"][1],
        b=bias,
    )
    assert apply(QuantizedLinearPass(), model) == []
    (node,) = model.graph
    assert [value and value.name for value in node.inputs] == ["x", "q.tiles", "b"]


def test_an_embedding_and_its_head_share_tiles() -> None:
    model = graph(
        f"""g (int64[B, S] ids) => (float[B, S, {N}] y) {{
        w = DequantizeLinear <axis = 1, block_size = {BLOCK}> (q, s)
        h = Gather <axis = 0> (w, ids) f = Reshape(h, flat)
        l = Gemm <transB = 1> (f, w) y = Reshape(l, back) }}""",
        q=(VALUES.T - 8).astype(ml_dtypes.int4),
        s=SCALES.T,
        flat=np.array([-1, K]),
        back=np.array([1, -1, N]),
    )
    assert apply(QuantizedLinearPass(), model) == []
    rows, product = model.graph
    assert (rows.op_type, product.op_type) == ("QuantizedRows", "QuantizedLinear")
    assert rows.inputs[1] is product.inputs[1]
    np.testing.assert_array_equal(decoded(rows), ((VALUES - 8) * spread(SCALES)).T.astype(np.float32))


def test_products_of_one_weight_that_keeps_blocks_share_tiles() -> None:
    rows = RNG.integers(0, 60, (N, 34), dtype=np.uint8)  # of 32 inputs in Q8_0
    packed: list[npt.NDArray[np.uint8]] = []

    def pack(form: StoredForm, parts: Sequence[npt.NDArray[np.uint8]], inputs: int) -> npt.NDArray[np.uint8]:
        packed.append(np.concatenate(parts))
        return np.zeros((2, stored_tile_bytes(form, inputs)), np.uint8)

    text = f"g (float[B, 32] x) => (float[B, {N}] y, float[B, {N}] z) {{ y = MatMul(x, w) z = MatMul(x, w) }}"
    model = graph(text, w=np.zeros((32, N), np.float32))
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    order = np.arange(N)[::-1]
    whole = StoredRows(34, order, lambda first, count: rows[first : first + count])
    tensor.meta[STORED] = StoredBlocks("Q8_0", 8, (whole,))
    assert apply(QuantizedLinearPass(pack), model) == []
    first, second = model.graph
    assert {first.op_type, second.op_type} == {"QuantizedLinear"}
    assert first.inputs[1] is second.inputs[1]
    assert (attributes(first)["inputs"], attributes(first)["outputs"], attributes(first)["bits"]) == (
        32,
        N,
        8,
    )
    tiles = weight(first.inputs[1])
    assert tiles is not None
    assert tiles.nbytes == len(tiles.numpy().tobytes())
    np.testing.assert_array_equal(np.concatenate(packed), rows[::-1])


@pytest.mark.parametrize("axis", [0, 1])
def test_minima_of_blocks_become_operands_of_the_kernel(axis: int) -> None:
    """As GGUF's Q4_1 stores them: x = scale * value + minimum."""
    minima = RNG.standard_normal((K // BLOCK, N)).astype(np.float32)
    arrays = {
        "v": VALUES.astype(ml_dtypes.uint4),
        "s": SCALES,
        "z": np.zeros_like(POINTS).astype(ml_dtypes.uint4),
    }
    apart, offsets = (K // BLOCK, BLOCK, N), minima[:, None]
    if axis == 1:
        arrays = {name: array.T for name, array in arrays.items()}
        apart, offsets = (N, K // BLOCK, BLOCK), minima.T[:, :, None]
    signature = LINEAR if axis == 0 else f"g (int64[B, S] x) => (float[B, S, {K}] y)"
    reader = "MatMul(x, w)" if axis == 0 else "Gather <axis = 0> (w, x)"
    model = graph(
        f"""{signature} {{ d = DequantizeLinear <axis = {axis}, block_size = {BLOCK}> (v, s, z)
        r = Reshape(d, apart) a = Add(r, m) w = Reshape(a, whole) y = {reader} }}""",
        **arrays,
        m=offsets,
        apart=np.array(apart),
        whole=np.array((K, N) if axis == 0 else (N, K)),
    )
    assert apply(QuantizedLinearPass(), model) == []
    (node,) = model.graph
    assert attributes(node)["offsets"] == 2
    exact = (VALUES.astype(np.float32) * spread(SCALES) + spread(minima)).T
    np.testing.assert_array_equal(decoded(node), exact)


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("{ y = MatMul(x, f) }", []),
        (
            "{ w = DequantizeLinear <axis = 0, block_size = 24> (q, t) y = MatMul(x, w) }",
            ["the kernels have no blocks of 24"],
        ),
        (
            "{ w = DequantizeLinear <axis = 1, block_size = 16> (q, u) y = MatMul(x, w) }",
            ["the weight is blocked along its outputs"],
        ),
    ],
)
def test_other_products_are_left_alone(body: str, reasons: list[str]) -> None:
    model = graph(
        f"{LINEAR} {body}",
        f=np.ones((K, N), np.float32),
        q=VALUES.astype(np.int8),
        t=np.ones((2, N), np.float32),
        u=np.ones((K, 2), np.float32),
    )
    assert apply(QuantizedLinearPass(), model) == reasons
    assert [node.op_type for node in model.graph][-1] == "MatMul"


def test_weights_of_other_float_types_are_left_to_other_kernels() -> None:
    text = f"{LINEAR} {{ {DEQUANTIZED} y = MatMul(x, w) }}".replace("float[", "float16[")
    model = graph(text, q=VALUES.astype(np.int8), s=SCALES.astype(np.float16))
    assert apply(QuantizedLinearPass(), model) == ["the kernels compute in fp32, not in FLOAT16"]
