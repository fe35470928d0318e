"""Mixtures of experts from the exporter: lowered, and with int4 weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from engines import ENGINES, CachedDecoder
from exporter_golden import golden_path, prompt
from family_cases import write_case

from carryall.exporter.export import export_model, export_package
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams


@pytest.mark.long
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen3_moe-unnormalized"])
def test_lowered_to_the_cpu_they_generate_what_transformers_does(case: str, tmp_path: Path) -> None:
    package = export_package(write_case(case, tmp_path / "checkpoint"), tmp_path / "package")
    row = prompt()[0][0].tolist()
    with np.load(golden_path(case)) as golden, LLM(package.path, provider="cpu") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        result = llm.generate([row], params)[0]
        assert list(result.outputs[0].token_ids) == golden["tokens"][0].tolist()


def test_nothing_is_added_in_place(tmp_path: Path) -> None:
    """onnxruntime's ScatterND adds in several threads and loses sums of repeated tokens."""
    model = export_model(write_case("mixtral", tmp_path))
    assert not [node for node in model.graph if "Scatter" in node.op_type]


@pytest.mark.long
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_int4_experts_are_lowered_to_matmul_nbits(case: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    package = export_package(write_case(case, tmp_path / "checkpoint"), tmp_path / "package")
    quantize = WeightOnlyQuantizationPass(BlockFormat(block_size=16))
    save_model(run(package.load(), [*portable_passes(), quantize])[0], tmp_path / "int4.onnx")
    row = prompt()[0][:1]
    portable = ENGINES["onnxruntime"](tmp_path / "int4.onnx")
    expected = CachedDecoder(portable, tmp_path / "int4.onnx", 1)(row, np.ones_like(row))
    lowered, _ = run(ir.load(tmp_path / "int4.onnx"), slot_passes(SlotOptions(context_length=64)))
    left = [node.inputs[1] for node in lowered.graph if node.op_type in ("MatMul", "DequantizeLinear")]
    names = [str(value.name) for value in left if value is not None and value.is_initializer()]
    assert names
    assert all(name.endswith(".gate.weight") for name in names)  # routers
    save_model(lowered, tmp_path / "lowered.onnx")
    session, length = ort.InferenceSession(str(tmp_path / "lowered.onnx")), row.shape[1]
    inputs = {
        "input_ids": row,
        "position_ids": np.arange(length)[None],
        "seqlens_k": np.array([length - 1], np.int32),
        "total_sequence_length": np.array(length, np.int32),
        "logits_positions": np.arange(length)[None],
    }
    for given in session.get_inputs():
        if given.name.startswith("past_key_values"):
            inputs[given.name] = np.zeros((1, given.shape[1], 64, given.shape[3]), np.float32)
    np.testing.assert_allclose(session.run(["logits"], inputs)[0], expected, rtol=0, atol=1e-4)
