"""Groups of blocks with a common scale: found exactly where they are, and stored with the same values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from decoded_tiles import attributes, decoded
from graph_asserts import apply, graph

from carryall.graph_opt.graph.half_scales import GROUP_SIZE, Widened
from carryall.graph_opt.graph.lazy import lazy
from carryall.graph_opt.lower.products.merge import MergeProjectionsPass
from carryall.graph_opt.lower.products.quantized_linear import QuantizedLinearPass

K, N, BLOCK = 320, 20, 32
RNG = np.random.default_rng(0)
VALUES = RNG.integers(0, 16, (K, N))
POINTS = RNG.integers(5, 11, (K // BLOCK, N))
TEXT = f"""g (float[B, S, {K}] x) => (float[B, S, {N}] y) {{
    w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s, z) y = MatMul(x, w) }}"""


def scales_of(group: int) -> npt.NDArray[np.float16]:
    """Return float16 scales [blocks, outputs], multiples (1 to 11) of powers of two of each group."""
    blocks = K // BLOCK
    units = 2.0 ** RNG.integers(-9, -5, (-(-K // group), N))
    multiples = RNG.integers(1, 12, (blocks, N))
    multiples[:: group // BLOCK] = 11  # its greatest common divisor with another one is 1 or 11
    multiples[1 :: group // BLOCK] = 7
    return (np.repeat(units, group // BLOCK, 0)[:blocks] * multiples).astype(np.float16)


def lowered(half: ir.TensorProtocol) -> ir.Node:
    points = POINTS.astype(ml_dtypes.uint4)
    model = graph(TEXT, q=VALUES.astype(ml_dtypes.uint4), s=half.numpy().astype(np.float32), z=points)
    model.graph.initializers["s"].const_value = Widened(half)
    assert apply(QuantizedLinearPass(), model) == []
    (node,) = model.graph
    return node


def expected(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    spread = [np.repeat(part.astype(np.float32), BLOCK, 0) for part in (POINTS, scales)]
    return ((VALUES - spread[0]) * spread[1]).T.astype(np.float32)


@pytest.mark.parametrize("group", [64, 128, 192, 256])
def test_groups_are_found_and_keep_the_weights(group: int) -> None:
    scales = scales_of(group)
    node = lowered(ir.tensor(scales))
    assert attributes(node)["group_size"] == group
    np.testing.assert_array_equal(decoded(node), expected(scales))


def test_scales_without_common_units_keep_their_own() -> None:
    scales = RNG.uniform(0.1, 1, (K // BLOCK, N)).astype(np.float16)
    node = lowered(ir.tensor(scales))
    assert attributes(node)["group_size"] == 0
    np.testing.assert_array_equal(decoded(node), expected(scales))


def test_a_weight_that_exceeds_a_byte_in_units_of_its_group_has_no_groups() -> None:
    """12 times a value that is 11 from its zero point is 132."""
    scales = scales_of(64)
    scales[0, 0] *= np.float16(12 / 11)
    POINTS[0, 0], before = 4, POINTS[0, 0]
    node = lowered(ir.tensor(scales))
    POINTS[0, 0] = before
    assert attributes(node)["group_size"] == 0


def test_merged_products_keep_their_groups() -> None:
    """Scales of merged weights are lazy; those of stored ones are read, others state their groups."""
    scales = scales_of(128)
    points = POINTS.astype(ml_dtypes.uint4)
    for computed in (True, False):
        model = graph(
            f"""g (float[B, S, {K}] x) => (float[B, S, {N}] y, float[B, S, {N}] t) {{
            w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s, z) y = MatMul(x, w)
            v = DequantizeLinear <axis = 0, block_size = {BLOCK}> (r, u, o) t = MatMul(x, v) }}""",
            **{name: VALUES.astype(ml_dtypes.uint4) for name in "qr"},
            **{name: scales.astype(np.float32) for name in "su"},
            **dict.fromkeys("zo", points),
        )
        for name in "su":
            half: ir.TensorProtocol = ir.tensor(scales)
            if not computed:
                half = lazy(lambda: scales, ir.DataType.FLOAT16, scales.shape)
                half.meta[GROUP_SIZE] = 128
            model.graph.initializers[name].const_value = Widened(half)
        assert apply(MergeProjectionsPass(), model) == []
        assert apply(QuantizedLinearPass(), model) == []
        node = next(node for node in model.graph if node.op_type == "QuantizedLinear")
        assert attributes(node)["group_size"] == 128
        np.testing.assert_array_equal(decoded(node), np.concatenate([expected(scales)] * 2))


def test_scales_that_are_not_computed_yet_are_not_read() -> None:
    scales, reads = scales_of(128), []

    def compute() -> npt.NDArray[np.float16]:
        reads.append(1)
        return scales

    half = lazy(compute, ir.DataType.FLOAT16, scales.shape)
    half.meta[GROUP_SIZE] = 128
    model = graph(
        TEXT,
        q=VALUES.astype(ml_dtypes.uint4),
        s=scales.astype(np.float32),
        z=POINTS.astype(ml_dtypes.uint4),
    )
    model.graph.initializers["s"].const_value = Widened(half)
    apply(QuantizedLinearPass(), model)
    assert reads == []
    (node,) = model.graph
    assert attributes(node)["group_size"] == 128
    np.testing.assert_array_equal(decoded(node), expected(scales))
