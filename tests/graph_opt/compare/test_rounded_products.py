"""Kernels that round activations: a costly rounding passes ``verify``, a wrong graph or kernel does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_gguf import write_gguf

from carryall.exporter.export import export_package
from carryall.graph_opt.compare.bars import MAX_KL_ROUNDED, Bars
from carryall.graph_opt.compare.report import TokenResult, VerifyReport
from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

CONTEXT = 48
LARGE = 30  # factor of one channel behind each norm, as in models that were not rotated
CONFIDENT = 10  # factor of the logits


def sensitive_decoder(folder: Path) -> ir.Model:
    """Return a decoder in Q4_1 whose results depend much on the rounding of its activations."""
    file = folder / "model.gguf"
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    write_gguf("llama", file, types="Q4_1", max_position_embeddings=CONTEXT, **sizes)
    model = load_model(export_package(file, folder / "package").path / "model.onnx")
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and "norm" in name:
            gain = value.const_value.numpy().copy()
            gain[3] *= LARGE
            gain *= np.float32(CONFIDENT if name == "model.norm.weight" else 1)
            value.const_value = ir.tensor(gain, name=name)
    return model


def lowered(folder: Path) -> ir.Model:
    folder.mkdir()
    model, _ = run(sensitive_decoder(folder), portable_passes())
    run(model, slot_passes(SlotOptions(context_length=CONTEXT)))
    return model


def products(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "MatMulNBits"]


@pytest.mark.long
def test_a_costly_rounding_passes(tmp_path: Path) -> None:
    found = verify(sensitive_decoder(tmp_path), lowered(tmp_path / "lowered"))
    found.check()
    assert found.tokens is not None
    assert found.tokens.kl > 10 * MAX_KL_ROUNDED
    assert found.exact is not None
    assert found.exact.tokens is not None
    assert found.exact.tokens.kl < 1e-5
    assert found.simulated is not None
    assert found.simulated.mean_kl == pytest.approx(found.tokens.mean_kl, rel=0.5)
    assert "with products in float32: greedy tokens equal" in found.text()
    assert "rounding activations to int8 alone" in found.text()
    assert found.to_dict()["exact"]["passed"]


@pytest.mark.long
@pytest.mark.parametrize("which", [0, -1])
def test_an_error_smaller_than_the_rounding_fails(which: int, tmp_path: Path) -> None:
    wrong = lowered(tmp_path / "lowered")
    scales = products(wrong)[which].inputs[2]
    assert scales is not None
    assert scales.const_value is not None
    scales.const_value = ir.tensor(scales.const_value.numpy() * np.float32(1.01), name=scales.name)
    found = verify(sensitive_decoder(tmp_path), wrong)
    assert found.reason is not None
    assert "with products in float32" in found.reason


@pytest.mark.long
def test_a_limit_of_the_caller_holds_for_the_rounded_results(tmp_path: Path) -> None:
    found = verify(sensitive_decoder(tmp_path), lowered(tmp_path / "lowered"), bars=Bars(max_kl=1e-3))
    assert found.exact is None
    assert found.reason is not None
    assert "above the limit 0.001" in found.reason


@pytest.mark.parametrize(("mean", "passed"), [(0.29, True), (0.31, False), (float("nan"), False)])
def test_a_kernel_that_rounds_more_fails(mean: float, passed: bool) -> None:
    tokens = TokenResult(kl=2.0, mean_kl=mean, greedy_equal=1, steps=2)
    simulated = TokenResult(kl=1.0, mean_kl=0.1, greedy_equal=1, steps=2)
    found = VerifyReport(
        reference="a", candidate="b", bars=Bars(max_kl=0.02), outputs={}, tokens=tokens, simulated=simulated
    )
    assert found.passed == passed
    assert passed or "3 times the effect of rounding activations" in str(found.reason)
