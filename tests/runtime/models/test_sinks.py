"""Attention with sinks runs in the targets' kernels and gives the logits of the portable graph."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

from carryall import LLM, SamplingParams
from carryall.exporter.export import export_package
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.graph.edit import insert
from carryall.providers import get_provider
from carryall.providers.base import Row
from carryall.providers.native.library import find_library
from carryall.providers.runners.explicit_runner import ExplicitRunner
from carryall.runtime.models.loading import load_model

SINKS = [-30.0, -1.0, 2.0, 20.0]  # from no weight at all to almost all of it
NO_WINDOWS = ["full_attention", "full_attention"]
# Prompts together, a long prompt (the window is 4), decoding of several rows, pieces on a cache.
STEPS = [{0: 5, 1: 9}, {2: 40}, {0: 1, 1: 1, 2: 1}, {1: 6}, {0: 1, 1: 1, 2: 1}]
needs_kernels = pytest.mark.usefixtures("kernels")
needs_openvino = pytest.mark.skipif(
    get_provider("openvino").available() is not None, reason="openvino is not installed"
)
TARGETS = [
    pytest.param("cpu", {"kernels": "onnxruntime"}, id="onnxruntime"),
    pytest.param("cpu", {"kernels": "carryall"}, id="carryall"),
    pytest.param("openvino", {}, id="openvino", marks=needs_openvino),
]


def package(folder: Path, **overrides: Any) -> Path:
    """Export a tiny gpt-oss in float32 whose sinks are ``SINKS`` in each layer."""
    checkpoint = write_tiny("gpt_oss", folder / "checkpoint", dtype=np.float32, **overrides)
    weights = load_file(checkpoint / "model.safetensors")
    held = {name: np.array(SINKS, np.float32) for name in weights if name.endswith("sinks")}
    save_file({**weights, **held}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return export_package(checkpoint, folder / "package").path


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("sinks"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def kernels(own_cache: None) -> None:
    """Skip a test of carryall's kernels where they are not built, in the cache of the test."""
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")


@pytest.mark.long
@pytest.mark.parametrize(("provider", "options"), TARGETS)
def test_logits_are_those_of_separate_operators(
    provider: str, options: dict[str, str], gpt_oss: Path
) -> None:
    if options.get("kernels") == "carryall" and find_library() is None:
        pytest.skip("the CPU kernels are not built")
    loaded = load_model(gpt_oss, provider=provider, max_slots=3, provider_options=options)
    try:
        assert isinstance(loaded.runner, ExplicitRunner) == (options.get("kernels") == "onnxruntime")
        exact, rng, lengths = PortableRunner(gpt_oss / "model.onnx"), np.random.default_rng(0), [0, 0, 0]
        for step in STEPS:
            tokens = {row: rng.integers(0, 256, count) for row, count in step.items()}
            rows = [Row(row, new, lengths[row], num_logits=len(new)) for row, new in tokens.items()]
            expected = exact.forward(tokens)
            for row, found in zip(rows, loaded.runner.forward(rows), strict=True):
                wanted = expected[row.slot]
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
                lengths[row.slot] += len(row.tokens)
    finally:
        loaded.runner.close()


def test_the_sinks_of_the_test_model_matter(gpt_oss: Path) -> None:
    """The comparison above could not see sinks that change nothing."""
    model, tokens = ir.load(gpt_oss / "model.onnx"), {0: np.arange(9)}
    for value in model.graph.initializers.values():
        if str(value.name).endswith("sinks"):
            value.const_value = ir.tensor(np.full(4, -1e4, np.float32), name=value.name)
    ir.save(model, gpt_oss / "changed.onnx")
    with_sinks, without = (PortableRunner(gpt_oss / f"{name}.onnx") for name in ("model", "changed"))
    logits = with_sinks.forward(tokens)[0]
    assert np.abs(logits - without.forward(tokens)[0]).max() > 1e-2 * np.abs(logits).max()


@needs_kernels
def test_sinks_that_are_computed_run_with_explicit_kv(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = package(tmp_path)
    model = ir.load(folder / "model.onnx")
    positions = next(value for value in model.graph.inputs if value.name == "position_ids")
    for value in list(model.graph.initializers.values()):
        for use in list(value.uses()) if str(value.name).endswith("sinks") else ():
            number = insert(use.node, "Cast", [positions], {"to": 1}).outputs[0]
            nothing = insert(use.node, "ReduceMin", [insert(use.node, "Sub", [number, number]).outputs[0]])
            nothing.attributes.add(ir.AttrInt64("keepdims", 0))
            moved = insert(use.node, "Add", [value, nothing.outputs[0]]).outputs[0]
            use.node.replace_input_with(use.idx, moved)
    ir.save(model, folder / "model.onnx", external_data="changed.data")
    (folder / "carryall.json").unlink()
    shutil.copy(tmp_path / "checkpoint" / "config.json", folder)
    with (
        caplog.at_level(logging.WARNING, "carryall"),
        LLM(folder, max_slots=2) as llm,
    ):
        outputs = llm.generate([[3, 4]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 2
    assert [record for record in caplog.records if "one operator" in record.getMessage()]


@needs_kernels
def test_requests_share_blocks_and_give_the_tokens_of_single_requests(tmp_path: Path) -> None:
    model = package(tmp_path, layer_types=NO_WINDOWS)
    prompts = [list(range(3, 3 + count)) for count in (40, 41, 7, 60)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(model, max_slots=4, provider_options={"kv_memory": "paged"}) as llm:
        together = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
    with LLM(model, max_slots=1, provider="ep:CPU") as llm:
        alone = [list(llm.generate([prompt], params)[0].outputs[0].token_ids) for prompt in prompts]
    assert together == alone
