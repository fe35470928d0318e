"""Calibrated weight-only quantization, from layer-by-layer calibration to the quantized graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.algorithms.smooth import SmoothQuantPass
from carryall.graph_opt.quantize.calibration.activations import ActivationReader
from carryall.graph_opt.quantize.formats.weight_only import WeightFormats, WeightOnlyQuantizationPass
from carryall.graph_opt.quantize.search.calibrated import CALIBRATED, QuantizedLayers, quantize_layers

RNG = np.random.default_rng(0)
WINDOWS = [RNG.integers(0, 256, 60) for _ in range(6)]
INT4 = BlockFormat(block_size=16, symmetric=False)
INT8 = BlockFormat(bits=8, block_size=16, symmetric=False)
Floats = npt.NDArray[np.float32]


def logits(path: Path) -> Floats:
    output = ir.load(path).graph.outputs[0]
    result: Floats = ActivationReader(path, [str(output.name)]).read(np.arange(20))["logits"]
    return result


def quantized(
    checkpoint: Path, out: Path, forms: WeightFormats, algorithm: str | None
) -> QuantizedLayers | None:
    """Write the graph of a checkpoint; quantize it unless ``algorithm`` is None."""
    model, found = export_model(checkpoint), None
    passes: Sequence[ir.passes.PassBase] = ()
    if algorithm is not None:
        (folder := out.parent / f"{out.stem}.layers").mkdir()
        found = quantize_layers(model, CALIBRATED[algorithm], forms, WINDOWS, folder, context_length=64)
        weights = WeightOnlyQuantizationPass(
            forms.form, embedding=forms.embedding, overrides=forms.overrides, calibrated=found.result
        )
        passes = [SmoothQuantPass(found.factors), weights]
    for one in passes:
        one(model)
    ir.save(model, out)
    return found


@pytest.mark.long
@pytest.mark.parametrize("algorithm", list(CALIBRATED))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_eight_bits_predict_as_float(family: str, algorithm: str, tmp_path: Path) -> None:
    """Scaled channels, transposed heads and biases are written correctly."""
    checkpoint = write_tiny(family, tmp_path / "checkpoint")
    quantized(checkpoint, tmp_path / "float.onnx", WeightFormats(INT8), None)
    found = quantized(checkpoint, tmp_path / "int8.onnx", WeightFormats(INT8), algorithm)
    assert found is not None
    assert bool(found.factors) == algorithm.startswith("awq")
    exact = logits(tmp_path / "float.onnx")
    error = np.linalg.norm(logits(tmp_path / "int8.onnx") - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.06


def test_single_weights_can_have_other_formats(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    forms = WeightFormats(INT4, embedding=INT8, overrides={names[0]: INT8, names[1]: None})
    checkpoint = write_tiny("llama", tmp_path / "checkpoint", tie_word_embeddings=True)
    quantized(checkpoint, tmp_path / "mixed.onnx", forms, "awq+gptq")
    values = ir.load(tmp_path / "mixed.onnx").graph.initializers
    assert values[f"{names[0]}.values"].dtype == ir.DataType.UINT8
    assert values[names[1]].dtype == ir.DataType.FLOAT
    assert values[f"{names[2]}.values"].dtype == ir.DataType.UINT4
    assert values["model.embed_tokens.weight.values"].dtype == ir.DataType.UINT8


def test_a_weight_gets_blocks_that_divide_its_inputs(tmp_path: Path) -> None:
    """The down projection has 48 inputs, which 32 does not divide, and gets blocks of 16."""
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    quantized(checkpoint, tmp_path / "some.onnx", WeightFormats(BlockFormat()), "gptq")
    values = ir.load(tmp_path / "some.onnx").graph.initializers
    assert values["model.layers.0.mlp.down_proj.weight.scales"].shape == [3, 32]
    assert values["model.layers.0.mlp.up_proj.weight.scales"].shape == [1, 48]


def test_a_nan_weight_is_named(tmp_path: Path) -> None:
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    head = model.graph.initializers["lm_head.weight"]
    head.const_value = ir.tensor(np.full((32, 260), np.nan, np.float32), name=head.name)
    with pytest.raises(GraphError, match=r"weight lm_head.weight cannot be quantized: it holds NaN"):
        quantize_layers(model, CALIBRATED["awq"], WeightFormats(INT4), WINDOWS, tmp_path, context_length=64)
