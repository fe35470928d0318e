"""Checkpoint folders run in place: no package, the same results, errors for files that change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiny_models import write_tiny

from carryall import LLM, QuantizationRecipe, SamplingParams, export
from carryall.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, UsageError
from carryall.exporter import weights
from carryall.exporter.export import export_model
from carryall.graph_opt.pipeline.exported import exported_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes
from carryall.providers.host import machine
from carryall.providers.native.library import find_library
from carryall.runtime.models import building
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.model_source import CheckpointModel, resolve_model

PROMPT = list(range(3, 30))
METHODS = ["int4-fast", "int8-fast", "int8-dynamic", "fp16"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny", hidden_size=128, intermediate_size=128)


def logprobs(model: Path, **options: Any) -> np.ndarray:
    """The log-probabilities of the prompt's tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    with LLM(model, **options) as llm:
        found = llm.generate(PROMPT, params)[0].prompt_logprobs
    assert found is not None
    return np.array([next(iter(each.values())).logprob for each in found[1:] if each])


@pytest.mark.long
@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_checkpoint_runs_in_place_with_the_bits_of_its_package(
    checkpoint: Path, tmp_path: Path, cache: Path, method: str | None
) -> None:
    here = logprobs(checkpoint, **({} if method is None else {"quantize": method}))
    assert not (cache / "packages").exists()
    package = export(checkpoint, tmp_path / "package", quantize=method).path
    np.testing.assert_array_equal(here, logprobs(package))


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt2", "mixtral"]
)
@pytest.mark.parametrize("method", ["int4-fast", "int8-fast", "int8-dynamic"])
def test_quantized_graphs_of_the_exporter_are_canonical(tmp_path: Path, family: str, method: str) -> None:
    """Loading a checkpoint in place runs only ``exported_passes``."""
    passes, _ = QuantizationRecipe(method).passes()
    model, _ = run(export_model(write_tiny(family, tmp_path / "tiny")), passes)
    _, report = run(model, portable_passes())
    named = {getattr(each, "name", type(each).__name__).removesuffix("Pass") for each in exported_passes()}
    assert {each.name for each in report.passes if each.fired} <= named


def test_the_second_start_builds_no_graph(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logprobs(checkpoint, quantize="int4-fast")
    monkeypatch.setattr(building, "checkpoint_graph", lambda *_: pytest.fail("the graph was built again"))
    np.testing.assert_array_equal(logprobs(checkpoint, quantize="int4-fast"), first)


@pytest.mark.long
def test_the_start_of_a_prepared_model_imports_no_library_of_graphs(checkpoint: Path) -> None:
    load_model(checkpoint, quantize="int4-fast").close()
    code = (
        "import sys; from carryall.runtime.models.loading import load_model\n"
        f"load_model({str(checkpoint)!r}, quantize='int4-fast').close()\n"
        "print({'onnx_ir', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_other_weights_of_the_same_name_are_prepared_again(checkpoint: Path) -> None:
    first = logprobs(checkpoint)
    write_tiny("llama", checkpoint, seed=1, hidden_size=128, intermediate_size=128)
    assert np.abs(logprobs(checkpoint) - first).max() > 1e-3


def test_weights_that_are_replaced_while_they_are_read_are_an_error(
    checkpoint: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny("llama", tmp_path / "other", seed=1, hidden_size=128, intermediate_size=128)
    original, calls = weights.warn_unless_finite, 0

    def check(values: np.ndarray, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.replace(other / "model.safetensors", checkpoint / "model.safetensors")
        original(values, name)

    monkeypatch.setattr(weights, "warn_unless_finite", check)
    with pytest.raises(CheckpointError, match="replaced or changed while it was read"):
        load_model(checkpoint)
    assert calls >= 3
    assert not list(cache.rglob("*.onnx*"))


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve_model(checkpoint)
    assert isinstance(found, CheckpointModel)
    size = found.unprepared_bytes
    assert size > 4 * 128 * 128
    monkeypatch.setattr(machine, "memory", lambda: (size - 1, 10**12))
    with pytest.raises(UsageError, match="of weights, and this process may use"):
        load_model(checkpoint)
    load_model(checkpoint, quantize="int4-fast").close()  # which fits


@pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")
def test_weights_of_16_bits_need_half_the_memory_and_the_disk(tmp_path: Path, cache: Path) -> None:
    sizes, files = [], []
    for number, dtype in enumerate((np.float32, ml_dtypes.bfloat16)):
        options = {"hidden_size": 256, "intermediate_size": 512, "dtype": dtype}
        source = resolve_model(write_tiny("llama", tmp_path / str(number), **options))
        assert isinstance(source, CheckpointModel)
        sizes.append(source.unprepared_bytes)
        load_model(source.folder, provider_options={"kernels": "carryall"}).close()
        files.append(max(cache.glob("lowered/*/weights.data"), key=lambda file: file.stat().st_mtime_ns))
    assert 0.5 <= sizes[1] / sizes[0] < 0.51
    assert files[1].stat().st_size < 0.6 * files[0].stat().st_size  # rotary tables and norms are float32


def test_a_disk_without_room_is_refused_before_it_is_written(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkpoint)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"preparing .* writes .* which has 1.0 kB left"):
        load_model(checkpoint)
    assert not (cache / "lowered").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_cache_that_cannot_be_made_is_no_full_disk(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", "/proc/nowhere/below")
    with pytest.raises(UsageError, match="/proc/nowhere cannot be made"):
        load_model(checkpoint)


def test_errors_name_what_is_missing(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="quantize must be one of int4"):
        load_model(checkpoint, quantize="int3")
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard"'))
    with pytest.raises(UnsupportedModelError, match="unheard"):
        load_model(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises((CheckpointError, ModelNotFoundError), match=r"model\.safetensors|neither"):
        load_model(checkpoint)


def test_a_split_model_runs_in_place(checkpoint: Path) -> None:
    whole = logprobs(checkpoint)
    np.testing.assert_allclose(logprobs(checkpoint, provider="cpu:0-0,cpu:1-1"), whole, atol=1e-4)
