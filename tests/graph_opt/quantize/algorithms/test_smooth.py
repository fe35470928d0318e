"""Added outlier channels, as in large models, are found by measurement and corrected by SmoothQuant."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Floats
from carryall.graph_opt.quantize.algorithms.smooth import (
    SmoothQuantPass,
    largest_activations,
    smoothing_factors,
)
from carryall.graph_opt.quantize.calibration.calibrators import min_max
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from carryall.graph_opt.quantize.search.ranges import input_histograms
from carryall.graph_opt.quantize.search.sensitivity import (
    dynamic_rounding,
    float_inputs,
    product_errors,
    static_rounding,
)

FORM = BlockFormat(bits=8, block_size=16)
RNG = np.random.default_rng(0)
WINDOWS = [RNG.integers(0, 256, 50) for _ in range(3)]
LAYERS = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def scale(model: ir.Model, name: str, factor: object) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor((value.const_value.numpy() * factor).astype(np.float32), name=name)


def plant(family: str, folder: Path, size: float) -> Path:
    """Scale a channel after the first norm by ``size``, and its weights by 1 / ``size``."""
    model = export_model(write_tiny(family, folder / "checkpoint"))
    factor = np.ones(32, np.float32)
    factor[5] = size
    norm = next(node for node in model.graph if node.op_type in ("RMSNormalization", "LayerNormalization"))
    for value in norm.inputs[1:]:
        assert value is not None
        scale(model, str(value.name), factor)
    for use in norm.outputs[0].uses():
        weight = use.node.inputs[1]
        assert weight is not None
        scale(model, str(weight.name), 1 / factor[:, None])
    return save(model, folder / "outliers.onnx")


@pytest.fixture(params=["llama", "gpt2"])
def outliers(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a model with an outlier channel."""
    return plant(request.param, tmp_path, 300)


def factors_of(path: Path) -> dict[str, Floats]:
    return smoothing_factors(path, largest_activations(path, WINDOWS, context_length=64))


def ranges_of(path: Path, factors: dict[str, Floats]) -> dict[str, float]:
    histograms = input_histograms(path, WINDOWS, context_length=64, factors=factors)
    return {name: min_max(histogram) for name, histogram in histograms.items()}


def smoothed(path: Path) -> Path:
    pass_ = SmoothQuantPass(factors_of(path))
    model = ir.load(path)
    pass_(model)
    assert pass_.fired in (4, 7)  # two norms a layer; with llama two gated MLPs, and the norm before its head
    return save(model, path.with_name("smooth.onnx"))


def test_errors_locate_outliers_and_smoothing_removes_them(outliers: Path) -> None:
    before = product_errors(outliers, WINDOWS[0], dynamic_rounding)
    after = product_errors(smoothed(outliers), WINDOWS[0], dynamic_rounding)
    bad = {name for name, error in before.items() if error > 0.1}
    assert 1 <= len(bad) <= 3
    assert all(".0." in name and ("attn" in name) for name in bad)
    assert max(after[name] for name in bad) < 0.03
    assert max(after.values()) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["dynamic", "static"])
def test_smoothing_or_the_error_limit_corrects_outliers(family: str, method: str, tmp_path: Path) -> None:
    """The errors are of whole logits; outliers in https://arxiv.org/abs/2208.07339 are up to 60."""
    path, tokens = plant(family, tmp_path, 60), WINDOWS[0]
    exact = PortableRunner(path).forward({0: tokens})[0]

    def error(divided: dict[str, Floats], vetoed: Collection[str] = ()) -> float:
        passes: list[GraphPass] = [SmoothQuantPass(divided)] if divided else []
        spared: dict[str, Any] = {"exclude": vetoed, "overrides": dict.fromkeys(left if vetoed else ())}
        if method == "dynamic":
            passes.append(DynamicQuantizationPass(FORM, **spared))
        else:
            passes.append(StaticQuantizationPass(FORM, ranges_of(path, divided), **spared))
        model = pipeline.run(ir.load(path), passes)[0]
        quantized = save(model, tmp_path / f"{len(divided)}-{len(vetoed)}.onnx")
        logits = PortableRunner(quantized).forward({0: tokens})[0]
        return float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))

    rounding = dynamic_rounding if method == "dynamic" else static_rounding(ranges_of(path, {}))
    errors = product_errors(path, tokens, rounding)
    vetoed = [name for name, found in errors.items() if found > 0.05]
    assert 1 <= len(vetoed) <= 3
    weights = product_errors(path, tokens, float_inputs, form=FORM, only=vetoed)
    left = [name for name, found in weights.items() if found > 0.05]
    plain, smooth, vetoing = error({}), error(factors_of(path)), error({}, vetoed)
    assert plain > 0.5
    assert smooth < 0.1
    assert vetoing < plain / 4


def test_the_float_model_stays_the_same(outliers: Path) -> None:
    tokens = RNG.integers(0, 256, 20)
    left, right = (PortableRunner(path).forward({0: tokens})[0] for path in (outliers, smoothed(outliers)))
    np.testing.assert_allclose(left, right, atol=2e-4 * float(np.abs(left).max()))


def test_nan_activations_are_named(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    scale(model, "model.layers.0.input_layernorm.weight", np.inf)
    with pytest.raises(GraphError, match="NaN or infinity on the calibration text"):
        product_errors(save(model, tmp_path / "broken.onnx"), WINDOWS[0], dynamic_rounding)
