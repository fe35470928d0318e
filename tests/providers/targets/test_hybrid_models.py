"""Models with recurrent states on devices: explicit states, one sequence a run; the CPU is the device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_stand_ins import STAND_INS, CudaOnCpu, DirectMLOnCpu, TensorRTOnCpu, WebGpuOnCpu
from engine_kit import make_request, run
from family_cases import write_case
from tiny_whisper import write_whisper

from carryall.errors import GraphError
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.saving import save_model
from carryall.providers import get_provider
from carryall.providers.base import EncoderOutput, Provider, Row, RunnerConfig
from carryall.providers.host.selftest_checks import difference, logits_of
from carryall.runtime.engine.engine import Engine
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.tasks import selftest_models
from carryall.runtime.tasks.selftest import tolerance

WITH_STATES = ["cuda-on-cpu", "webgpu-on-cpu"]
REFERENCE = {"kernels": "onnxruntime"}


@functools.cache
def reference(form: str) -> Any:
    make = functools.partial(selftest_models.decoder, "lfm2", form)
    return logits_of(get_provider("cpu"), make, selftest_models.CONTEXT, REFERENCE)


@pytest.mark.long
@pytest.mark.parametrize("form", selftest_models.FORMS)
@pytest.mark.parametrize("name", WITH_STATES)
def test_prompts_steps_and_copies_have_the_logits_of_the_cpu(name: str, form: str) -> None:
    make = functools.partial(selftest_models.decoder, "lfm2", form)
    found = logits_of(STAND_INS[name](), make, selftest_models.CONTEXT, {})
    assert difference(found, reference(form)) < (1e-3 if form == "float" else tolerance("lfm2", form))


@pytest.mark.long
def test_half_precision_keeps_states_in_float32() -> None:
    make = functools.partial(selftest_models.decoder, "lfm2", "float")
    found = logits_of(CudaOnCpu(), make, selftest_models.CONTEXT, {"compute": "fp16"})
    assert 0 < difference(found, reference("float")) < 0.01


@pytest.mark.parametrize("provider", [TensorRTOnCpu(), DirectMLOnCpu()], ids=lambda one: one.name)
def test_others_refuse_them_with_the_reason(provider: Provider) -> None:
    make = functools.partial(selftest_models.decoder, "lfm2", "float")
    with pytest.raises(GraphError, match=r"past_conv|CausalConvWithState"):
        logits_of(provider, make, selftest_models.CONTEXT, {})


@pytest.mark.long
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "falcon_h1"])
def test_requests_get_the_tokens_of_the_cpu(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with prefixes in common, which are copied with their states."""
    source = resolve_model(export_package(write_case(family, tmp_path / "tiny"), tmp_path / "package").path)
    start = [5, 6, 7, 8] * 20

    def tokens(provider: Provider, **options: Any) -> list[list[int]]:
        config = RunnerConfig(max_slots=2, context_length=128, options=options)
        path = tmp_path / f"{provider.name}.onnx"
        save_model(lower(source, provider, config), path)
        engine = Engine(provider.runner(path, config))
        requests = [make_request(str(i), text) for i, text in enumerate((start, [*start, 9, 3], [11] * 5))]
        found = run(engine, requests)
        engine.close()
        return found

    expected = tokens(get_provider("cpu"), **REFERENCE)
    assert tokens(CudaOnCpu()) == expected
    assert tokens(WebGpuOnCpu()) == expected
    assert "sequences run one by one" in caplog.text


@pytest.mark.long
def test_attention_to_the_rows_of_an_encoder_is_that_of_the_cpu(tmp_path: Path) -> None:
    source = resolve_model(export_package(write_whisper(tmp_path / "tiny", 0), tmp_path / "package").path)
    logits = []
    for name, provider, options in (
        ("cpu", get_provider("cpu"), REFERENCE),
        ("cuda", CudaOnCpu(), {}),
    ):
        config = RunnerConfig(max_slots=2, context_length=16, options=dict(options))
        save_model(lower(source, provider, config), tmp_path / f"{name}.onnx")
        runner = provider.runner(tmp_path / f"{name}.onnx", config)
        shape = runner.info.encoder_rows, runner.info.encoder_width
        states = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        encoder = EncoderOutput(bytes(32), states)
        first = runner.forward([Row(0, np.arange(1, 6), 0, num_logits=5, encoder=encoder)])[0].copy()
        logits.append([*first, *runner.forward([Row(0, np.arange(2, 3), 5)])[0]])
        runner.close()
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float", "int4", "int8"])
def test_a_gpu_in_software_has_the_logits_of_the_cpu(form: str) -> None:
    device = get_provider("webgpu")
    if (reason := device.available()) is not None:
        pytest.skip(reason)
    make = functools.partial(selftest_models.decoder, "lfm2", form)
    found = logits_of(device, make, selftest_models.CONTEXT, {"compute": "fp32"})
    assert difference(found, reference(form)) < (1e-3 if form == "float" else tolerance("lfm2", form))
