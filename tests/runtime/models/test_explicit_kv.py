"""Decoders whose attention no kernel of the CPU computes in place run with explicit KV."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall import LLM, SamplingParams, optimize
from carryall.errors import UnsupportedAttentionError
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.edit import insert, nodes_of
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.models.lowering import lowered_model
from carryall.runtime.models.model_source import resolve_model

PROMPTS = [[5, 6, 7, 8, 9], [70, 80]]


@pytest.fixture
def biased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder whose mask adds a bias that no kernel knows: the square root of a key's position; a folder
    of Optimum's layout.
    """
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    folder = export_package(write_tiny("llama", tmp_path / "tiny"), tmp_path / "model").path
    model = ir.load(folder / "model.onnx")
    attention = next(iter(nodes_of(model.graph, "Attention")))
    mask = attention.inputs[3]
    assert mask is not None
    table = ir.val("roots", const_value=ir.tensor(np.sqrt(np.arange(128, dtype=np.float32)), name="roots"))
    model.graph.register_initializer(table)
    zero = ir.val("zero", const_value=ir.tensor(np.array([0]), name="zero"))
    model.graph.register_initializer(zero)
    total = insert(attention, "Shape", [mask], {"start": 3, "end": 4}).outputs[0]
    bias = insert(attention, "Slice", [table, zero, total, zero]).outputs[0]
    biased = insert(attention, "Add", [mask, bias]).outputs[0]
    for node in nodes_of(model.graph, "Attention"):
        node.replace_input_with(3, biased)
    ir.save(model, folder / "model.onnx", external_data="biased.data")
    (folder / "carryall.json").unlink()
    return folder


def greedy(model: Path, provider: str, slots: int) -> list[list[int]]:
    with LLM(model, provider=provider, max_slots=slots) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def test_the_cpu_generates_the_tokens_of_separate_operators(
    biased: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "carryall"):
        found = greedy(biased, "cpu", 2)
    assert found == greedy(biased, "ep:CPU", 2)
    (line,) = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert "the mask adds a bias to visible keys" in line
    assert "\n" not in line


def test_optimize_for_the_cpu_keeps_explicit_kv_and_the_results(biased: Path, tmp_path: Path) -> None:
    report = optimize(biased / "model.onnx", tmp_path / "out.onnx", target="cpu", verify=True)
    assert report.verification is not None
    assert report.verification.passed
    lowered = ir.load(tmp_path / "out.onnx")
    assert "adds a bias" in lowered.metadata_props["explicit_kv"]
    assert "attention_mask" in {value.name for value in lowered.graph.inputs}
    shutil.copytree(biased, tmp_path / "copy", ignore=shutil.ignore_patterns("*.onnx"))
    for name in ("out.onnx", "out.onnx.data"):
        shutil.copy(tmp_path / name, tmp_path / "copy")
    assert greedy(tmp_path / "copy" / "out.onnx", "cpu", 2) == greedy(biased, "cpu", 2)


@pytest.mark.long
def test_openvino_generates_the_same_tokens_and_says_why_it_is_slower(
    biased: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy(biased, "cpu", 2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "carryall"):
        assert greedy(biased, "openvino", 2) == expected
    (line,) = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert "the mask adds a bias to visible keys" in line
    assert "use a provider" not in line


def test_openvino_says_that_a_softcap_makes_it_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    folder = write_tiny("gemma2", tmp_path / "tiny")
    with caplog.at_level(logging.WARNING, "carryall"):
        greedy(folder, "openvino", 1)
    (line,) = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert "softcap" in line


def test_a_target_without_explicit_kv_says_why(biased: Path) -> None:
    config = RunnerConfig(context_length=64)
    match = "adds a bias to visible keys.*the provider cpu computes it"
    with pytest.raises(UnsupportedAttentionError, match=match):
        lowered_model(resolve_model(biased), get_provider("directml"), config)
