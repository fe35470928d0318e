from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, canonical, evaluate, graph

from carryall.errors import GraphError
from carryall.graph_opt.graph.lazy import lazy
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

RNG = np.random.default_rng(0)
W = RNG.standard_normal((32, 8)).astype(np.float32)
TABLE = RNG.standard_normal((8, 32)).astype(np.float32)
LINEAR = "g (float[B, 32] x) => (float[B, 8] y) { y = MatMul(x, w) }"
TIED = """g (int64[B, S] input_ids, float[R, 32] rows) => (float[B, S, 32] e, float[R, 8] logits) {
    e = Gather(table, input_ids) logits = Gemm <transB = 1> (rows, table) }"""


def quantize(model: ir.Model, *, form: BlockFormat | None = None, **options: object) -> list[str]:
    return apply(WeightOnlyQuantizationPass(form or BlockFormat(), **options), model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype", "tolerance"),
    [
        (4, True, ir.DataType.INT4, 0.3),
        (4, False, ir.DataType.UINT4, 0.3),
        (8, True, ir.DataType.INT8, 0.02),
        (8, False, ir.DataType.UINT8, 0.02),
    ],
)
def test_a_linear_layer_reads_blocked_weights(
    bits: int, symmetric: bool, dtype: ir.DataType, tolerance: float
) -> None:
    model = graph(LINEAR, w=W)
    assert quantize(model, form=BlockFormat(bits=bits, block_size=16, symmetric=symmetric)) == []
    first, second = model.graph
    assert (first.op_type, second.op_type) == ("DequantizeLinear", "MatMul")
    assert first.attributes["axis"].as_int() == 0
    assert first.attributes["block_size"].as_int() == 16
    initializers = model.graph.initializers
    assert initializers["w.values"].dtype == dtype
    assert initializers["w.scales"].shape == (2, 8)
    assert ("w.zero_points" in initializers) is not symmetric
    assert "w" not in initializers
    x = np.eye(32, dtype=np.float32)
    (result,) = evaluate(model, {"x": x})
    np.testing.assert_allclose(result, W, atol=tolerance)


def test_embedding_and_tied_head_share_one_weight_blocked_along_the_hidden_axis() -> None:
    model = graph(TIED, table=TABLE)
    assert quantize(model, form=BlockFormat(block_size=16)) == []
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "Gather", "Gemm"]
    assert model.graph[0].attributes["axis"].as_int() == 1
    feed = {"input_ids": np.arange(8)[None], "rows": np.eye(32, dtype=np.float32)}
    embedded, logits = evaluate(model, feed)
    np.testing.assert_allclose(embedded[0], TABLE, atol=0.3)
    np.testing.assert_array_equal(logits, embedded[0].T)


def test_a_size_that_no_block_divides_stays_float_and_is_reported() -> None:
    model = graph(LINEAR.replace("32", "24"), w=W[:24])
    before = canonical(model)
    assert quantize(model) == ["weight w has 24 inputs, which is not a multiple of 16"]
    assert canonical(model) == before


@pytest.mark.parametrize(("inputs", "block"), [(576, 64), (192, 64), (960, 64), (1536, 128), (48, 16)])
def test_a_weight_gets_the_largest_block_that_divides_its_inputs(inputs: int, block: int) -> None:
    values = np.random.default_rng(0).normal(size=(inputs, 8)).astype(np.float32)
    model = graph(LINEAR.replace("32", str(inputs)), w=values)
    assert quantize(model, form=BlockFormat(block_size=128)) == []
    (node,) = (node for node in model.graph if node.op_type == "DequantizeLinear")
    assert node.attributes["block_size"].as_int() == block
    (found,) = evaluate(model, {"x": np.eye(inputs, dtype=np.float32)})
    assert np.linalg.norm(found - values) < 0.13 * np.linalg.norm(values)


def test_a_weight_summed_along_both_axes_stays_float_and_is_reported() -> None:
    text = """g (float[B, 32] x) => (float[B, 32] a, float[B, 32] b) {
        a = MatMul(x, w) b = Gemm <transB = 1> (x, w) }"""
    model = graph(text, w=np.tile(W, 4))
    assert quantize(model) == ["weight w is summed along different axes by its consumers"]


def test_positions_biases_and_norms_stay_float() -> None:
    text = """g (int64[B, S] position_ids, float[B, S, 32] x) => (float[B, S, 32] y) {
        p = Gather(table, position_ids) a = Add(x, p) y = RMSNormalization(a, scale) }"""
    model = graph(text, table=TABLE, scale=np.ones(32, np.float32))
    assert quantize(model) == []
    assert [node.op_type for node in model.graph] == ["Gather", "Add", "RMSNormalization"]


def test_weights_can_have_different_formats() -> None:
    text = "g (float[B, 32] x) => (float[B, 8] y, float[B, 8] z) { y = MatMul(x, v) z = MatMul(x, w) }"
    model = graph(text, v=W, w=W)
    quantize(model, overrides={"v": None, "w": BlockFormat(bits=8)})
    assert "v" in model.graph.initializers
    assert model.graph.initializers["w.values"].dtype == ir.DataType.INT8


def test_nothing_is_computed_before_the_model_is_written(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> np.ndarray:
        calls.append(1)
        return W

    model = graph(LINEAR, w=W)
    tensor = lazy(compute, ir.DataType.FLOAT, W.shape)
    tensor.name = "w"
    model.graph.initializers["w"].const_value = tensor
    quantize(model)
    assert calls == []
    ir.save(model, tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0, max_workers=2)
    assert calls == [1]  # values and scales of one evaluation


def test_a_damaged_weight_is_named() -> None:
    damaged = W.copy()
    damaged[0, 0] = np.nan
    model = graph(LINEAR, w=damaged)
    quantize(model)
    content = model.graph.initializers["w.values"].const_value
    assert content is not None
    with pytest.raises(GraphError, match="weight w cannot be quantized: it holds NaN or infinity"):
        content.numpy()
