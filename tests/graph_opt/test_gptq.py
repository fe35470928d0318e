"""GPTQ and the second moments it works with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.quantize import gptq
from carryall.graph_opt.quantize.blockwise import BlockFormat, Quantized, round_to_nearest
from carryall.graph_opt.quantize.moments import SecondMoments
from carryall.runtime.errors import GraphError, UsageError

RNG = np.random.default_rng(0)
Floats = npt.NDArray[np.float32]


def dequantized(result: Quantized, form: BlockFormat) -> Floats:
    levels = result.values.astype(np.float32)
    if result.zero_points is not None:
        levels -= np.repeat(result.zero_points.astype(np.float32), form.block_size, 0)
    values: Floats = levels * np.repeat(result.scales, form.block_size, 0)
    return values


def correlated_inputs(count: int, width: int) -> Floats:
    """Inputs of a few strong directions, as activations have, of sizes that differ a lot."""
    mixed = RNG.standard_normal((count, 12)) @ RNG.standard_normal((12, width))
    return ((mixed + 0.3 * RNG.standard_normal((count, width))) * RNG.uniform(0.2, 3, width)).astype(
        np.float32
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (4, 128), (8, 64)])
def test_products_with_typical_inputs_are_nearer_than_by_rounding(
    bits: int, block_size: int, symmetric: bool
) -> None:
    form = BlockFormat(bits=bits, block_size=block_size, symmetric=symmetric)
    weight = RNG.standard_normal((256, 1100)).astype(np.float32)  # more columns than one round takes
    x = correlated_inputs(2000, 256)
    moments = x.T @ x / np.float32(len(x))
    exact = x @ weight
    errors = [
        float(np.square(x @ dequantized(result, form) - exact).mean())
        for result in (gptq.quantize(weight, form, moments), round_to_nearest(weight, form))
    ]
    assert errors[0] < 0.4 * errors[1]


def test_values_stay_in_range_and_zeros_stay_zero() -> None:
    form = BlockFormat(block_size=16)
    weight = RNG.standard_normal((32, 5)).astype(np.float32)
    weight[:, 2] = 0
    result = gptq.quantize(weight, form, np.eye(32, dtype=np.float32))
    assert result.values.dtype == np.int8
    assert -8 <= result.values.min() <= result.values.max() <= 7
    assert not dequantized(result, form)[:, 2].any()


def test_inputs_that_never_occur_are_no_fault() -> None:
    form = BlockFormat(block_size=16)
    moments = np.diag(np.repeat([1.0, 0.0], 16)).astype(np.float32)
    weight = RNG.standard_normal((32, 5)).astype(np.float32)
    result = dequantized(gptq.quantize(weight, form, moments), form)
    np.testing.assert_allclose(result[:16], weight[:16], atol=0.35)


def test_a_weight_that_is_no_number_is_refused() -> None:
    weight = np.full((32, 2), np.nan, np.float32)
    with pytest.raises(GraphError, match="it holds NaN or infinity"):
        gptq.quantize(weight, BlockFormat(block_size=16), np.eye(32, dtype=np.float32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moments")
    path = folder / "float.onnx"
    ir.save(export_model(write_tiny("llama", folder / "checkpoint")), path, external_data="float.onnx.data")
    return path


def test_moments_do_not_depend_on_how_many_fit_into_memory(model: Path) -> None:
    windows = [RNG.integers(0, 256, 50) for _ in range(3)]
    names = [
        f"model.layers.{i}.{part}.weight" for i in range(2) for part in ("self_attn.k_proj", "mlp.down_proj")
    ]
    whole, parts = (
        SecondMoments(model, windows, context_length=64, max_bytes=size) for size in (1 << 30, 10000)
    )
    told: list[int] = []
    parts.measure_first(lambda done, _total, _name: told.append(done))
    assert told == [1, 2, 3]
    for name in [*names, "lm_head.weight"]:
        width = 48 if "down" in name else 32
        moments = whole.of(name)
        assert moments.shape == (width, width)
        assert np.linalg.eigvalsh(moments).min() > -1e-4
        np.testing.assert_allclose(parts.of(name), moments, rtol=1e-5, atol=1e-6)
    assert "model.embed_tokens.weight" not in whole  # read, and multiplied with nothing


def test_what_leaves_a_norm_has_moments_of_one(model: Path) -> None:
    windows = [RNG.integers(0, 256, 64) for _ in range(3)]
    gain = ir.load(model).graph.initializers["model.layers.0.input_layernorm.weight"].const_value
    assert gain is not None
    moments = SecondMoments(model, windows, context_length=64).of("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_allclose((np.diagonal(moments) / np.square(gain.numpy())).mean(), 1, rtol=1e-3)


def test_too_little_text(model: Path) -> None:
    moments = SecondMoments(model, [np.arange(20)], context_length=64)
    with pytest.raises(UsageError, match="20 tokens; at least 128"):
        moments.of("lm_head.weight")
