"""Float weights that 16 bits hold are lowered to tiles of the same values; others stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.graph.lazy import HALVES, Halves, concat_last, halves_of, lazy, reshape, transpose
from carryall.graph_opt.lower.products.half_products import HalfProductsPass
from carryall.graph_opt.shard.weights import take

K, N = 48, 22
RNG = np.random.default_rng(0)
FLOATS = RNG.standard_normal((K, N)).astype(np.float32)
TYPES = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16}
LINEAR = f"g (float[B, S, {K}] x) => (float[B, S, {N}] y)"


def held(kind: ir.DataType, values: npt.NDArray[np.float32] = FLOATS) -> npt.NDArray[np.float32]:
    return values.astype(TYPES[kind]).astype(np.float32)


def halves(array: npt.NDArray[np.float32], kind: ir.DataType) -> Halves:
    return Halves(kind, lambda: array.astype(TYPES[kind]).view(np.uint16))


def marked(model: ir.Model, kind: ir.DataType, name: str = "w") -> ir.Model:
    """Make a weight lazy, as the exporter does, with the mark of its 16-bit type."""
    value = model.graph.initializers[name]
    tensor = value.const_value
    assert tensor is not None
    array = tensor.numpy()
    value.const_value = lazy(lambda: array, ir.DataType.FLOAT, array.shape)
    value.const_value.meta[HALVES] = halves(array, kind)
    return model


def weight_of(node: ir.Node) -> npt.NDArray[np.float32]:
    """Return the weight [outputs, inputs] that the tiles of a node hold."""
    tiles = node.inputs[1]
    assert tiles is not None
    assert tiles.const_value is not None
    sizes: dict[str, Any] = {name: attribute.as_int() for name, attribute in node.attributes.items()}
    assert (sizes["bits"], sizes["block_size"], sizes["group_size"]) == (16, 1, 0)
    kind = {5: np.float16, 6: ml_dtypes.bfloat16}[sizes["offsets"]]
    stored = tiles.const_value.numpy()[:, : sizes["inputs"] * 32].reshape(-1).view(kind)
    columns = stored.reshape(-1, sizes["inputs"], 16).transpose(0, 2, 1).reshape(-1, sizes["inputs"])
    assert not columns[sizes["outputs"] :].any()
    result: npt.NDArray[np.float32] = columns[: sizes["outputs"]].astype(np.float32)
    return result


@pytest.mark.parametrize("kind", TYPES)
def test_a_product_with_a_bias_keeps_its_weights(kind: ir.DataType) -> None:
    bias = RNG.standard_normal(N).astype(np.float32)
    model = graph(f"{LINEAR} {{ p = MatMul(x, w) y = Add(p, b) }}", w=held(kind), b=bias)
    assert apply(HalfProductsPass(), marked(model, kind)) == []
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("carryall", "QuantizedLinear")
    assert [value and value.name for value in node.inputs] == ["x", "w.tiles", "b"]
    np.testing.assert_array_equal(weight_of(node), held(kind).T)


@pytest.mark.parametrize("size", [(K, N), (80, 70)])
@pytest.mark.parametrize("kind", TYPES)
def test_an_embedding_and_its_head_share_tiles(kind: ir.DataType, size: tuple[int, int]) -> None:
    """Also where the head alone would be split."""
    inputs, outputs = size
    values = held(kind, RNG.standard_normal(size).astype(np.float32))
    model = graph(
        f"""g (int64[B, S] ids) => (float[B, S, {outputs}] y) {{
        h = Gather <axis = 0> (w, ids) f = Reshape(h, flat)
        l = Gemm <transB = 1> (f, w) y = Reshape(l, back) }}""",
        w=values.T.copy(),
        flat=np.array([-1, inputs]),
        back=np.array([1, -1, outputs]),
    )
    assert apply(HalfProductsPass(split=True), marked(model, kind)) == []
    rows, product = model.graph
    assert (rows.op_type, product.op_type) == ("QuantizedRows", "QuantizedLinear")
    assert rows.inputs[1] is product.inputs[1]
    np.testing.assert_array_equal(weight_of(product), values.T)


def test_large_float32_weights_are_split_into_pairs_of_bfloat16() -> None:
    """Each 32 inputs are 16 lines of high parts and 16 of low ones, input i beside input i + 16."""
    inputs, outputs = 72, 70
    values = RNG.standard_normal((inputs, outputs)).astype(np.float32)
    text = f"g (float[B, {inputs}] x) => (float[B, {outputs}] y) {{ y = MatMul(x, w) }}"
    model = graph(text, w=values)
    assert apply(HalfProductsPass(wide=True, split=True), model) == []
    (node,) = model.graph
    assert (node.attributes["bits"].as_int(), node.attributes["offsets"].as_int()) == (32, 10)
    tiles = node.inputs[1]
    assert tiles is not None
    assert tiles.const_value is not None
    words = tiles.const_value.numpy().view(ml_dtypes.bfloat16).reshape(5, 3, 2, 16, 16, 2)
    high, low = words.transpose(2, 0, 4, 1, 5, 3).reshape(2, 80, 96).astype(np.float64)
    assert not (np.abs(low) > 2.0**-8 * np.abs(high)).any()
    np.testing.assert_allclose((high + low)[:outputs, :inputs], values.T, rtol=2.0**-17, atol=0)
    assert not (high + low)[outputs:].any()
    assert not (high + low)[:, inputs:].any()


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_large_weights_of_16_bits_are_split_by_their_type(kind: ir.DataType, rounds: bool) -> None:
    """Of bfloat16 a part is enough; where rows are rounded, those of float16 are two, else they stay."""
    inputs, outputs = 72, 70
    values = held(kind, RNG.standard_normal((inputs, outputs)).astype(np.float32))
    text = f"g (float[B, {inputs}] x) => (float[B, {outputs}] y) {{ y = MatMul(x, w) }}"
    model = marked(graph(text, w=values), kind)
    assert apply(HalfProductsPass(wide=True, split=True, rounds=rounds), model) == []
    (node,) = model.graph
    form = node.attributes["bits"].as_int(), node.attributes["offsets"].as_int()
    if kind == ir.DataType.FLOAT16:
        assert form == ((32, 10) if rounds else (16, 5))
        return
    assert form == (16, 13 if rounds else 10)
    tiles = node.inputs[1]
    assert tiles is not None
    assert tiles.const_value is not None
    words = tiles.const_value.numpy().view(ml_dtypes.bfloat16).reshape(5, 3, 16, 16, 2)
    stored = words.transpose(0, 3, 1, 4, 2).reshape(80, 96).astype(np.float32)
    np.testing.assert_array_equal(stored[:outputs, :inputs], values.T)
    assert not stored[outputs:].any()
    assert not stored[:, inputs:].any()


@pytest.mark.parametrize("wrong", [np.inf, np.nan, 3e38])
def test_small_weights_and_those_of_huge_values_are_not_split(wrong: float) -> None:
    huge = RNG.standard_normal((64, 64)).astype(np.float32)
    huge[3, 4] = wrong
    for values in (huge, huge[:63, 32:], huge[32:, :63]):
        inputs, outputs = values.shape
        text = f"g (float[B, {inputs}] x) => (float[B, {outputs}] y) {{ y = MatMul(x, w) }}"
        model = graph(text, w=values)
        apply(HalfProductsPass(wide=True, split=True), model)
        assert [node.attributes["offsets"].as_int() for node in model.graph] == [9]


def left_alone(text: str, kind: ir.DataType | None = ir.DataType.BFLOAT16, **arrays: Any) -> bool:
    model = graph(text, **arrays)
    before = [node.op_type for node in model.graph]
    apply(HalfProductsPass(), model if kind is None else marked(model, kind))
    return [node.op_type for node in model.graph] == before


def test_what_the_kernels_do_not_compute_stays() -> None:
    half = held(ir.DataType.BFLOAT16)
    assert left_alone(f"{LINEAR} {{ y = MatMul(x, w) }}", None, w=FLOATS)  # not known to be of 16 bits
    assert left_alone(f"g (float[A, {K}] x) => (float[A, 8] y) {{ y = MatMul(x, w) }}", w=half[:, :8])
    assert left_alone(
        "g (float[B, A, 6] x) => (float[B, A, 11] y) { y = MatMul(x, w) }", w=half[None, :6, :11]
    )
    assert left_alone(f"g (float[A, {K}] x) => (float[A, {N}] y) {{ y = Gemm(x, w) }}", w=half)
    scaled = f"g (float[A, {K}] x) => (float[A, {N}] y) {{ y = Gemm <transB = 1, alpha = 2.0> (x, w) }}"
    assert left_alone(scaled, w=half.T.copy())
    columns = f"g (int64[A] i) => (float[{K}, A] y) {{ y = Gather <axis = 1> (w, i) }}"
    assert left_alone(columns, w=half)


def test_what_only_moves_values_moves_them_in_16_bits() -> None:
    kind = ir.DataType.FLOAT16
    first, second = (lazy(lambda: held(kind), ir.DataType.FLOAT, (K, N)) for _ in range(2))
    first.meta[HALVES] = second.meta[HALVES] = halves(held(kind), kind)
    moved = [transpose(first), reshape(first, (N, K)), concat_last([first, second])]
    for tensor in [*moved, take(first, np.array([3, 1, 7]), -1)]:
        found = halves_of(tensor)
        assert found is not None
        np.testing.assert_array_equal(found.read().view(np.float16).astype(np.float32), tensor.numpy())
    second.meta[HALVES] = halves(held(ir.DataType.BFLOAT16), ir.DataType.BFLOAT16)
    assert halves_of(concat_last([first, second])) is None
    assert halves_of(lazy(lambda: FLOATS, ir.DataType.FLOAT, (K, N))) is None


@pytest.mark.parametrize("at", [None, 0, K * N - 1])
def test_the_values_of_a_file_decide(tmp_path: Path, at: int | None) -> None:
    values = held(ir.DataType.BFLOAT16)
    if at is not None:
        values.reshape(-1)[at] = np.float32(1 / 3)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    shape = ir.Shape(values.shape)
    tensor = ir.ExternalTensor(
        "w.bin", 0, values.nbytes, ir.DataType.FLOAT, shape=shape, name="w", base_dir=tmp_path
    )
    found = halves_of(tensor)
    assert (found is None) == (at is not None)
    if found is not None:
        assert found.kind == ir.DataType.BFLOAT16
        np.testing.assert_array_equal(found.read().view(ml_dtypes.bfloat16).astype(np.float32), values)
