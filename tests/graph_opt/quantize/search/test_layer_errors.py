"""The error of each quantized layer's output."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.calibration.activations import ActivationReader
from carryall.graph_opt.quantize.recipe import QuantizationRecipe
from carryall.graph_opt.quantize.search.layer_errors import layer_errors

TOKENS = np.random.default_rng(0).integers(0, 256, 40)
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    ir.save(export_model(write_tiny("llama", path.parent / "checkpoint")), path)
    return path


def quantized(reference: Path, folder: Path, method: str, bits_of_block: int | None = 16) -> Path:
    products = [node for node in ir.load(reference).graph if node.op_type == "MatMul"]
    names = {str(node.inputs[0].name) for node in products}  # type: ignore[union-attr]
    values = ActivationReader(reference, sorted(names)).read(TOKENS)
    ranges = {name: float(np.abs(value).max()) for name, value in values.items()}
    symmetric = True if method == "int4-fast" else None
    recipe = QuantizationRecipe(method, bits_of_block, symmetric, embedding="int4" if symmetric else None)
    measured = None if method != "int8-static" else cast(Any, SimpleNamespace(ranges=lambda *_: ranges))
    model, _ = run(ir.load(reference), recipe.passes(measured)[0])
    ir.save(model, folder / f"{method}.onnx")
    return folder / f"{method}.onnx"


def test_an_error_is_that_of_the_stored_weight_on_float_inputs(reference: Path, tmp_path: Path) -> None:
    found = layer_errors(reference, quantized(reference, tmp_path, "int4-fast"), TOKENS)
    assert len(found) == 15
    graph = ir.load(reference).graph
    product = next(use.node for use in graph.initializers[DOWN].uses())
    (x,) = ActivationReader(reference, [str(product.inputs[0].name)]).read(TOKENS).values()  # type: ignore[union-attr]
    stored = ir.load(tmp_path / "int4-fast.onnx").graph.initializers
    values, scales = (stored[f"{DOWN}.{part}"].const_value.numpy() for part in ("values", "scales"))  # type: ignore[union-attr]
    exact = graph.initializers[DOWN].const_value.numpy()  # type: ignore[union-attr]
    error = x @ (values.astype(np.float32) * np.repeat(scales, 16, axis=0) - exact)
    assert found[DOWN] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(x @ exact), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "block", "least", "most"),
    [("int8-dynamic", 16, 1e-3, 0.03), ("int8-static", 16, 1e-3, 0.06), ("bf16", None, -1, 0.01)],
)
def test_every_method_is_measured(
    reference: Path, tmp_path: Path, method: str, block: int | None, least: float, most: float
) -> None:
    found = layer_errors(reference, quantized(reference, tmp_path, method, block), TOKENS)
    assert len(found) == 15
    assert least < found[DOWN] < most


def test_the_float_model_has_none(reference: Path) -> None:
    assert set(layer_errors(reference, reference, TOKENS).values()) == {0.0}
