"""Planted outlier channels, as large models have: found by measuring, and repaired by SmoothQuant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.quantize.blockwise import Floats
from carryall.graph_opt.quantize.sensitivity import dynamic_rounding, product_errors
from carryall.graph_opt.quantize.smooth import SmoothQuantPass, largest_activations, smoothing_factors
from carryall.graph_opt.runners import PortableRunner
from carryall.runtime.errors import GraphError

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


@pytest.fixture(params=["llama", "gpt2"])
def outliers(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A channel behind the first norm is 300 times larger, and its weights as much smaller."""
    model = export_model(write_tiny(request.param, tmp_path / "checkpoint"))
    factor = np.ones(32, np.float32)
    factor[5] = 300
    norm = next(node for node in model.graph if node.op_type in ("RMSNormalization", "LayerNormalization"))
    for value in norm.inputs[1:]:
        assert value is not None
        scale(model, str(value.name), factor)
    for use in norm.outputs[0].uses():
        weight = use.node.inputs[1]
        assert weight is not None
        scale(model, str(weight.name), 1 / factor[:, None])
    return save(model, tmp_path / "outliers.onnx")


def factors(path: Path) -> dict[str, Floats]:
    return smoothing_factors(path, largest_activations(path, WINDOWS, context_length=64))


def smoothed(path: Path) -> Path:
    pass_ = SmoothQuantPass(factors(path))
    model = ir.load(path)
    pass_(model)
    assert pass_.fired in (4, 7)  # two norms a layer; with llama two gated MLPs, and the norm before its head
    return save(model, path.with_name("smooth.onnx"))


def test_errors_show_where_the_outliers_are_and_smoothing_removes_them(outliers: Path) -> None:
    before = product_errors(outliers, WINDOWS[0], dynamic_rounding)
    after = product_errors(smoothed(outliers), WINDOWS[0], dynamic_rounding)
    bad = {name for name, error in before.items() if error > 0.1}
    assert 1 <= len(bad) <= 3
    assert all(".0." in name and ("attn" in name) for name in bad)
    assert max(after[name] for name in bad) < 0.03
    assert max(after.values()) < 0.1


def test_the_float_model_stays_the_same(outliers: Path) -> None:
    tokens = RNG.integers(0, 256, 20)
    left, right = (PortableRunner(path).forward({0: tokens})[0] for path in (outliers, smoothed(outliers)))
    np.testing.assert_allclose(left, right, atol=2e-4 * float(np.abs(left).max()))


def test_activations_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    scale(model, "model.layers.0.input_layernorm.weight", np.inf)
    with pytest.raises(GraphError, match="NaN or infinity on the calibration text"):
        product_errors(save(model, tmp_path / "broken.onnx"), WINDOWS[0], dynamic_rounding)
