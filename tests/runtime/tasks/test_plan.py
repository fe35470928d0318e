"""Plans: sizes are those of the prepared model, choices follow from them, and bad numbers are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_gguf
from tiny_models import write_tiny
from tiny_vlms import write_vlm

from carryall import LLM, SamplingParams, export, plan
from carryall.errors import UsageError
from carryall.runtime.models.loading import load_model
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.tasks.plan import _PROCESS, STORED, Cache, PlannedForm, PlanReport

GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny", hidden_size=128, intermediate_size=256)


def forms(report: PlanReport) -> dict[str, PlannedForm]:
    return {form.form: form for form in report.forms}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", STORED), ("llama", "int4-fast"), ("gemma2", "int8-fast"), ("qwen3_5_text", "int4-fast")],
)
def test_sizes_are_those_of_the_prepared_model(tmp_path: Path, cache: Path, family: str, form: str) -> None:
    model = write_tiny(family, tmp_path / "tiny")
    planned = forms(plan(model, bandwidth=1e9, context_length=96, batch=2))[form]
    assert not (cache / "lowered").exists()  # nothing but headers was read
    options: dict[str, Any] = {} if form == STORED else {"quantize": form}
    loaded = load_model(model, context_length=96, **options)
    info = loaded.runner.info
    loaded.close()
    assert planned.kv_bytes_per_token == info.kv_bytes_per_token
    assert planned.sequence_bytes == sum(group.size(96) for group in info.kv_groups)
    (weights,) = (cache / "lowered").glob("*/weights.data")
    assert planned.weight_bytes == pytest.approx(weights.stat().st_size, rel=0.02, abs=8192)
    assert planned.total_bytes == planned.weight_bytes + 2 * planned.sequence_bytes + _PROCESS


@pytest.mark.parametrize("form", [STORED, "int8-fast"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_model_sees_with_counts(tmp_path: Path, cache: Path, form: str, packed: bool) -> None:
    model = write_vlm(tmp_path / "seeing")
    if packed:
        model = export(model, tmp_path / "package").path
    planned = forms(plan(model, bandwidth=1e9, context_length=512))[form]
    assert not (cache / "lowered").exists()
    assert not (cache / "vision").exists()
    with LLM(model, context_length=512, quantize=None if form == STORED else form) as llm:
        image = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
        llm.chat([{"role": "user", "content": [image]}], SamplingParams(max_tokens=1))
    folders = (cache / "lowered").iterdir()
    (encoder,) = (folder for folder in folders if not (folder / "weights.data").exists())
    stored = (encoder / "model.onnx.data").stat().st_size
    assert planned.encoder_bytes == pytest.approx(stored, rel=0.02, abs=8192)
    assert planned.encoder_bytes > 8192
    rest = planned.weight_bytes + planned.sequence_bytes + _PROCESS
    assert planned.total_bytes == rest + planned.encoder_bytes


def test_a_model_that_reads_text_has_no_encoder(checkpoint: Path) -> None:
    assert {form.encoder_bytes for form in plan(checkpoint, bandwidth=1e9).forms} == {0}


def test_a_window_bounds_the_cache() -> None:
    cache = Cache(heads=2, row=64, window=128)
    assert cache.size(100) == 2 * 64 * 128  # whole blocks of 32
    assert cache.size(10_000) == 2 * 64 * (128 + 256)
    assert (cache.read(100), cache.read(10_000)) == (2 * 64 * 100, 2 * 64 * 128)
    assert Cache(2, 64, 0).size(10_000) == 2 * 64 * 10_016


def test_the_bandwidth_bounds_the_speed(checkpoint: Path) -> None:
    slow, fast = (forms(plan(checkpoint, bandwidth=speed, batch=4)) for speed in (1e9, 5e9))
    for name, form in slow.items():
        assert fast[name].tokens_per_second == pytest.approx(5 * form.tokens_per_second)
        reads = form.step_bytes + 4 * form.kv_bytes_per_token * 128
        assert form.tokens_per_second == pytest.approx(4 * 1e9 / reads)


@pytest.mark.long
def test_this_machine_is_measured(checkpoint: Path) -> None:
    report = plan(checkpoint)
    assert report.measured
    assert report.bandwidth_gb_s > 0.1
    assert all(form.tokens_per_second > 0 for form in report.forms)
    assert not plan(checkpoint, bandwidth=1e9).measured


def test_the_goal_and_the_memory_decide(checkpoint: Path) -> None:
    report = plan(checkpoint, bandwidth=1e9, memory=GB)
    assert (report.choice, report.command) == ("int8-fast", f"carryall run {checkpoint} --quantize int8-fast")
    assert plan(checkpoint, bandwidth=1e9, memory=GB, goal="speed").choice == "int4-fast"
    found = forms(report)
    small = found["int8-fast"].total_bytes - 1
    tight = plan(checkpoint, bandwidth=1e9, memory=small)
    narrow = forms(tight)["int8-fast"]
    assert (narrow.kv_cache, narrow.fits) == ("int8", True)  # the same weights with smaller keys and values
    assert tight.command.endswith("--quantize int8-fast --kv-cache-dtype int8")
    tiny = plan(checkpoint, bandwidth=1e9, memory=_PROCESS)
    assert (tiny.choice, tiny.command) == (None, "")
    assert "even int4-fast takes" in tiny.reason
    assert all(form.most_sequences == 0 for form in tiny.forms)


def test_most_sequences_fit_and_one_more_does_not(checkpoint: Path) -> None:
    memory = _PROCESS + 5_000_000
    most = forms(plan(checkpoint, bandwidth=1e9, memory=memory))["int8-fast"].most_sequences
    for batch, fits in ((most, True), (most + 1, False)):
        form = forms(plan(checkpoint, bandwidth=1e9, memory=memory, batch=batch))["int8-fast"]
        assert (form.kv_cache == "bfloat16") == fits


def test_what_is_quantized_has_one_form(checkpoint: Path, tmp_path: Path) -> None:
    package = export(checkpoint, tmp_path / "package", quantize="int4-fast").path
    half = export(checkpoint, tmp_path / "half", quantize="bf16").path
    write_gguf(
        "llama", tmp_path / "m.gguf", types="Q4_K", hidden_size=256, intermediate_size=256, head_dim=64
    )
    for model in (package, half, tmp_path / "m.gguf", package / "model.onnx"):
        report = plan(model, bandwidth=1e9)
        assert [form.form for form in report.forms] == [STORED]
        assert report.choice == STORED
        assert report.command == f"carryall run {model}"


def test_a_lowered_model_is_refused(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    (graph,) = loaded.graphs
    loaded.close()
    assert resolve_model(graph).lowered
    with pytest.raises(UsageError, match="was lowered for a target"):
        plan(graph)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"memory": 0}, "memory must be at least 1 byte"),
        ({"bandwidth": 0.0}, "bandwidth must be a positive number"),
        ({"bandwidth": float("nan")}, "bandwidth must be a positive number"),
        ({"batch": 0}, "batch must be between 1 and"),
        ({"context_length": 129}, r"context_length 129 is not in \[1, 128\]"),
        ({"goal": "size"}, "goal of plan must be"),
    ],
)
def test_wrong_numbers_are_refused(checkpoint: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        plan(checkpoint, **options)
