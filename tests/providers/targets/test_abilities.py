"""The table of `docs/cuda.md`: what each provider computes and refuses, with the CPU as the device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from device_stand_ins import CudaOnCpu, DirectMLOnCpu, PagedCudaOnCpu, TensorRTOnCpu, WebGpuOnCpu
from lowered_forms import CONTEXT, decoder
from tiny_whisper import write_whisper

from carryall.errors import CarryallError, GraphError
from carryall.exporter.export import export_package
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.pipeline import pipeline
from carryall.providers import get_provider
from carryall.providers.base import Provider, RunnerConfig
from carryall.runtime.models.lowered_graph import lower
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.tasks import selftest_models

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cuda.md"
HEADING = "| provider | recurrent states | pictures |"
PROVIDERS: dict[str, Provider] = {
    "cuda, slots": CudaOnCpu(),
    "cuda, paged": PagedCudaOnCpu(),
    "webgpu": WebGpuOnCpu(),
    "directml": DirectMLOnCpu(),
    "tensorrt, nv_tensorrt_rtx": TensorRTOnCpu(),
    "openvino": get_provider("openvino"),
}
CONFIG = RunnerConfig(max_slots=2, context_length=CONTEXT, num_threads=1)


def cells() -> dict[str, list[str]]:
    lines = iter(PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(HEADING))
    next(lines)
    rows: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *words = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name.replace("`", "")] = [re.split(r"[,;]", word)[0] for word in words]
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", PROVIDERS)
def test_the_table_is_true(name: str, tmp_path: Path) -> None:
    """Proposed tokens and copies for beams are in the contract of every runner (`test_contract.py`)."""
    provider, found = PROVIDERS[name], list[str]()
    found.append(_states(provider))
    found.append("yes" if provider.takes_images(CONFIG) else "refused")
    found.append(_encoder(provider, tmp_path))
    found.append(_int8(provider, tmp_path))
    save_model(
        pipeline.run(decoder("llama", "float", tmp_path), provider.passes(CONFIG))[0], tmp_path / "model.onnx"
    )
    runner = provider.runner(tmp_path / "model.onnx", CONFIG)
    readable = "on its CPU" if name == "openvino" else "yes"  # its other devices are not here
    found.append(readable if runner.info.kv_layout else "refused")
    runner.close()
    assert cells()[name] == [*found, "yes", "yes"]


def _states(provider: Provider) -> str:
    model = selftest_models.decoder("lfm2", "float")
    with pytest.raises(GraphError, match=r"past_conv.0|CausalConvWithState"):
        pipeline.run(model.clone(), provider.passes(CONFIG))
    explicit = provider.explicit_passes(CONFIG)
    if explicit is None:
        return "refused"
    try:
        pipeline.run(model, explicit)
    except CarryallError:
        return "refused"
    return "explicit"


def _encoder(provider: Provider, folder: Path) -> str:
    package = export_package(write_whisper(folder / "whisper", 0), folder / "package").path
    config = dataclasses.replace(CONFIG, context_length=16)
    try:
        model = lower(resolve_model(package), provider, config)
        kernels = getattr(provider, "kernels", CPU)
        if not kernels.standard_attention and any(node.op_type == "Attention" for node in model.graph):
            return "refused"  # by the device; the CPU has a kernel (``test_kernels.py``)
        save_model(model, folder / "encoder.onnx")
        runner = provider.runner(folder / "encoder.onnx", config)
    except CarryallError:
        return "refused"
    width = runner.info.encoder_width
    runner.close()
    return "explicit" if width else "refused"


def _int8(provider: Provider, folder: Path) -> str:
    config = dataclasses.replace(CONFIG, options={"kv_cache": "int8"})
    try:
        pipeline.run(decoder("llama", "int8-kv", folder), provider.passes(config))
    except CarryallError:
        return "refused"
    return "yes"
