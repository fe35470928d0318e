"""Calibrated weight-only quantization, from layer-by-layer calibration to the quantized graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.quantize.algorithms import cores
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Quantized
from carryall.graph_opt.quantize.algorithms.smooth import SmoothQuantPass
from carryall.graph_opt.quantize.calibration.activations import ActivationReader
from carryall.graph_opt.quantize.formats.weight_only import WeightFormats, WeightOnlyQuantizationPass
from carryall.graph_opt.quantize.search.calibrated import CALIBRATED, QuantizedLayers, quantize_layers
from carryall.storage.cache import CachedParts

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
        stages = CachedParts("layers", {"test": str(out)})
        found = quantize_layers(model, CALIBRATED[algorithm], forms, WINDOWS, stages, context_length=64)
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
    stages = CachedParts("layers", {"test": str(tmp_path)})
    with pytest.raises(GraphError, match=r"weight lm_head.weight cannot be quantized: it holds NaN"):
        quantize_layers(model, CALIBRATED["awq"], WeightFormats(INT4), WINDOWS, stages, context_length=64)


class Killed(BaseException):
    """What ends a run at once."""


def test_a_killed_run_goes_on_at_its_stage(tmp_path: Path) -> None:
    """The second run solves only what the first has not, and has the results of one that was not killed."""
    checkpoint, solved = write_tiny("llama", tmp_path / "checkpoint"), list[tuple[int, ...]]()
    algorithm = CALIBRATED["awq+gptq"]

    def solve(weight: Floats, *rest: Any) -> Quantized:
        solved.append(weight.shape)
        return algorithm.solve(weight, *rest)

    def run(name: str, last: int) -> QuantizedLayers:
        def progress(done: int, total: int, what: str) -> None:
            if done == last:
                raise Killed

        stages, counting = (
            CachedParts("layers", {"test": str(tmp_path / name)}),
            replace(algorithm, solve=solve),
        )
        model, forms = export_model(checkpoint), WeightFormats(INT4)
        try:
            return quantize_layers(
                model, counting, forms, WINDOWS, stages, context_length=64, progress=progress
            )
        finally:
            stages.close(delete=False)

    whole = run("whole", 0)
    every = len(solved)
    solved.clear()
    with pytest.raises(Killed):
        run("killed", 4)
    first = len(solved)
    again = run("killed", 0)
    assert 0 < first < every == len(solved)
    assert whole.factors
    assert whole.factors.keys() == again.factors.keys()
    for name, factor in whole.factors.items():
        np.testing.assert_array_equal(again.factors[name], factor)
    for name in export_model(checkpoint).graph.initializers:
        results = [read and read() for read in (whole.result(name), again.result(name))]
        assert (results[0] is None) == (results[1] is None)
        for part, other in zip(results[0] or (), results[1] or (), strict=True):
            np.testing.assert_array_equal(part, other)


def test_stored_stages_are_deleted(tmp_path: Path) -> None:
    stages = CachedParts("layers", {"test": str(tmp_path)})
    model = export_model(write_tiny("llama", tmp_path / "checkpoint"))
    quantize_layers(model, CALIBRATED["gptq"], WeightFormats(INT4), WINDOWS, stages, context_length=64)
    folder = stages.folder("anything", lambda folder: None)
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()]
    stages.close(delete=True)
    assert not folder.exists()


def test_two_runs_at_once_have_parts_of_their_own(tmp_path: Path) -> None:
    first, second = (CachedParts("layers", {"test": str(tmp_path)}) for _ in range(2))
    folders = [each.folder("part", lambda folder: (folder / "file").touch()) for each in (first, second)]
    assert folders[0] != folders[1]
    first.close(delete=True)
    assert (folders[1] / "file").exists()
    third = CachedParts("layers", {"test": str(tmp_path)})
    assert not third.is_kept("part")
    second.close(delete=True)
    third.close(delete=True)


def test_the_number_of_cores_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    for count in (1, 3):
        monkeypatch.setattr(cores, "CORES", count)
        quantized(checkpoint, tmp_path / f"{count}.onnx", WeightFormats(INT4), "gptq")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "3.onnx").read_bytes()
