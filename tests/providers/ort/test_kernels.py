"""Every node of every lowered graph has a kernel of its operator, version and types on its target."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_rules
import onnx_ir as ir
import pytest
from family_cases import write_case
from kernel_table import KernelTable, misfits
from lowered_forms import CONTEXT, FAMILIES, FORMS, decoder
from tiny_models import write_tiny
from tiny_vlms import write_vlm
from tiny_whisper import write_whisper

import carryall
from carryall.contract import is_past
from carryall.errors import GraphError, UnsupportedAttentionError
from carryall.exporter.export import export_model
from carryall.exporter.package import VISION_FILE
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.lower import kernels as kernels_of
from carryall.graph_opt.lower.pipelines.towers import tower_passes
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.formats.half import HalfPrecisionPass
from carryall.providers.base import Provider, RunnerConfig
from carryall.providers.targets.cpu import CpuProvider
from carryall.providers.targets.cuda import CudaProvider
from carryall.providers.targets.directml import DirectMLProvider
from carryall.providers.targets.nv_tensorrt_rtx import NvTensorRtRtxProvider
from carryall.providers.targets.tensorrt import TensorRTProvider
from carryall.providers.targets.webgpu import WebGpuProvider

CPU = KernelTable("cpu", kernel_rules.CPU)
CUDA = KernelTable("cuda", kernel_rules.CUDA)
WEBGPU = KernelTable("webgpu", kernel_rules.WEBGPU)
DIRECTML = KernelTable("directml", kernel_rules.DIRECTML)
TENSORRT = KernelTable("tensorrt", kernel_rules.TENSORRT)
HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


@dataclass(frozen=True)
class Target:
    """A provider with options, and the kernels that it has."""

    provider: Provider
    table: KernelTable
    options: dict[str, Any] = field(default_factory=dict)


TARGETS = {
    "cpu": Target(CpuProvider(), CPU),
    "cuda": Target(CudaProvider(), CUDA),
    "cuda-bf16": Target(CudaProvider(), CUDA, {"compute": "bf16"}),
    "cuda-paged": Target(CudaProvider(), CUDA, {"kv_memory": "paged"}),
    "cuda-old": Target(CudaProvider(), CUDA, {"kv_cache": "float32", "fused_experts": "off"}),
    "webgpu-fp16": Target(WebGpuProvider(), WEBGPU, {"compute": "fp16"}),
    "webgpu-fp32": Target(WebGpuProvider(), WEBGPU, {"compute": "fp32"}),
    "directml-fp16": Target(DirectMLProvider(), DIRECTML, {"compute": "fp16"}),
    "directml-fp32": Target(DirectMLProvider(), DIRECTML, {"compute": "fp32"}),
    "tensorrt": Target(TensorRTProvider(), TENSORRT),
    "tensorrt-rtx": Target(NvTensorRtRtxProvider(), TENSORRT),
}
# Mixtures need sorting and OneHot of integers, or an operator for all experts.
NO_MIXTURES = {"webgpu-fp16", "webgpu-fp32"}
EVERYTHING = [(target, family, form) for target in TARGETS for family in FAMILIES for form in FORMS]
# DirectML computes windows only up to a context of the window's size.
NO_WINDOWS = {"directml-fp16", "directml-fp32"}
# Each target with half of the forms, and each family with three of them.
QUICK = [
    (target, list(FAMILIES)[(2 * index + 3 * place) % len(FAMILIES)], form)
    for place, target in enumerate(TARGETS)
    for index, form in enumerate(FORMS)
    if (place + index) % 2 == 0
]
MARKS = {case: pytest.mark.long if number % 3 == 0 else () for number, case in enumerate(QUICK)}


@functools.cache
def _portable(family: str, form: str) -> ir.Model:
    """Return a decoder, exported once for all targets."""
    with tempfile.TemporaryDirectory() as folder:
        return decoder(family, form, Path(folder))


@pytest.mark.parametrize(
    ("target", "family", "form"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.slow)) for case in EVERYTHING],
)
def test_every_node_has_a_kernel(target: str, family: str, form: str) -> None:
    chosen = TARGETS[target]
    config = RunnerConfig(context_length=CONTEXT, options=chosen.options)
    model, passes = _portable(family, form).clone(), chosen.provider.passes(config)
    if target in NO_WINDOWS and "sliding_window" in FAMILIES[family]:
        with pytest.raises(UnsupportedAttentionError, match="window"):
            pipeline.run(model, passes)
        return
    model = pipeline.run(model, passes)[0]
    found = misfits(model, chosen.table, CPU)
    if target in NO_MIXTURES and any("OneHot" in reason for reason in found):
        assert all("OneHot has no kernel" in reason or "TopK has no kernel" in reason for reason in found)
    else:
        assert found == []


@pytest.mark.long
@pytest.mark.parametrize("form", ["int8-kv", "int8-kv-tensor"])
@pytest.mark.parametrize("memory", ["slots", "paged"])
def test_a_cache_of_fp8_has_kernels(memory: str, form: str) -> None:
    config = RunnerConfig(context_length=CONTEXT, options={"kv_memory": memory, "kv_cache": "fp8"})
    model = pipeline.run(_portable("qwen3", form).clone(), CudaProvider().passes(config))[0]
    caches = {value.dtype for value in model.graph.inputs if is_past(value.name)}
    assert caches == {ir.DataType.FLOAT8E4M3FN}
    assert misfits(model, CUDA, CPU) == []


@pytest.mark.long
@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda-bf16", "cuda-paged"])
def test_sinks_are_an_input_of_the_kernel(target: str, stored: str, tmp_path: Path) -> None:
    """All of CUDA's kernels take sinks of the type of the query."""
    chosen = TARGETS[target]
    config = RunnerConfig(context_length=CONTEXT, options=chosen.options)
    portable = export_model(write_tiny("gpt_oss", tmp_path / "checkpoint", **FAMILIES["llama"]))
    halved = [HalfPrecisionPass(ir.DataType.FLOAT16)] if stored == "float16" else []
    model = pipeline.run(portable, [*halved, *chosen.provider.passes(config)])[0]
    nodes = [node for node in model.graph if node.op_type in ("GroupQueryAttention", "PagedAttention")]
    assert len(nodes) == 2
    for node in nodes:
        assert node.inputs[11] is not None
        assert node.inputs[3] is not None
        assert node.inputs[11].dtype == node.inputs[3].dtype
    assert misfits(model, chosen.table, CPU) == []


EXPLICIT_STATES = {"cpu", "cuda", "cuda-bf16", "cuda-paged", "cuda-old", "webgpu-fp16", "webgpu-fp32"}


@pytest.mark.long
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "falcon_h1"])
def test_recurrent_states_are_explicit_or_refused(family: str, tmp_path: Path) -> None:
    """Short convolutions, the gated delta rule and Mamba-2; slots and blocks of onnxruntime hold none."""
    portable = export_model(write_case(family, tmp_path / "checkpoint"))
    for name, chosen in TARGETS.items():
        config = RunnerConfig(context_length=CONTEXT, options=chosen.options)
        with pytest.raises(GraphError, match=r"recurrent states|CausalConvWithState") as refused:
            pipeline.run(portable.clone(), chosen.provider.passes(config))
        assert "past_conv.0" in str(refused.value) or "opset 27" in str(refused.value), name
        explicit = chosen.provider.explicit_passes(config)
        assert (explicit is not None) == (name in EXPLICIT_STATES), name
        if explicit is not None:
            model = pipeline.run(portable.clone(), explicit)[0]
            assert any(node.op_type == "CausalConvWithState" for node in model.graph)
            assert misfits(model, chosen.table, CPU) == [], name


def test_attention_to_the_rows_of_an_encoder_has_kernels_on_cuda_alone(tmp_path: Path) -> None:
    portable = export_model(write_whisper(tmp_path / "checkpoint", 0))
    for table, provider, lacking in (
        (CUDA, CudaProvider(), False),
        (WEBGPU, WebGpuProvider(), True),
    ):
        options = {"compute": "fp16"}
        passes = provider.explicit_passes(RunnerConfig(context_length=32, options=options))
        assert passes is not None
        found = misfits(pipeline.run(portable.clone(), passes)[0], table, CPU)
        assert all("encoder_attn/Attention: Attention has no kernel" in reason for reason in found)
        assert bool(found) == lacking


@pytest.mark.long
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_towers_have_kernels_on_cuda_and_webgpu(family: str, tmp_path: Path) -> None:
    """DirectML and TensorRT lack RotaryEmbedding, RMSNormalization or Gelu of the tower's opset."""
    carryall.export(write_vlm(tmp_path / "checkpoint", family), tmp_path / "package")
    portable = load_model(tmp_path / "package" / VISION_FILE)
    for table, kernels in ((CUDA, kernels_of.CUDA), (WEBGPU, kernels_of.WEBGPU)):
        lowered = pipeline.run(portable.clone(), tower_passes(kernels, "float32"))[0]
        assert {"MultiHeadAttention"} <= {node.op_type for node in lowered.graph}
        assert misfits(lowered, table, CPU) == []


NBITS = "y = com.microsoft.MatMulNBits<K = 16, N = 4, bits = {}, block_size = {}>(x, w, s)"


@pytest.mark.parametrize(
    ("table", "body", "reason"),
    [
        (CUDA, "y = ReduceMax(x)", "ReduceMax: it needs cuDNN"),
        (WEBGPU, "y = OneHot(i, depth, v)", "OneHot has no kernel of version 11"),
        (WEBGPU, "a = Add(i, i) y = Cast<to = 1>(a)", "Cast has no kernel of {'T1': 'int64'"),
        (CUDA, NBITS.format(4, 8), "blocks of 8"),
        (WEBGPU, NBITS.format(3, 16), "3 bits"),
        (CPU, "y = com.microsoft.SparsePagedAttention(x)", "no kernel"),
        (DIRECTML, NBITS.format(4, 16), "3 inputs, not 4"),
        (DIRECTML, "a = Add(i, i) y = Mod(a, i)", "Mod has no kernel of {'T': 'int64'"),
        (TENSORRT, "y = com.microsoft.QuickGelu(x)", "QuickGelu has no kernel"),
        (CUDA, "y = com.microsoft.QuickGelu<beta = 1.0>(x)", "QuickGelu has no attributes ['beta']"),
        (CUDA, "y = com.microsoft.QuickGelu(x, v)", "QuickGelu has 1 inputs, not 2"),
        (TENSORRT, "a = Add(i, i) y = ReduceSum(x, a)", "input 1 is computed"),
    ],
)
def test_a_node_without_a_kernel_is_found(table: KernelTable, body: str, reason: str) -> None:
    inputs = "float[2, 16] x, int64[3] i, int64 depth, float[2] v, uint8[4, 1, 8] w, float[4] s"
    (found,) = misfits(ir.from_onnx_text(f"{HEADER} g ({inputs}) => (y) {{ {body} }}"), table, CPU)
    assert reason in found


def test_a_kernel_without_end_is_for_one_version_of_the_operator() -> None:
    """Gather 13- does not run Gather of a newer schema; Abs 6-12 runs every version up to 12."""
    model = ir.from_onnx_text(f"{HEADER} g (float[2, 16] x) => (y) {{ y = Abs(x) }}")
    cases = (
        (21, 13, None, True),
        (21, 6, 12, False),
        (21, 6, None, False),
        (12, 6, 12, True),
    )
    for opset, first, last, fits in cases:
        table = KernelTable("cpu", {})
        table.rows = {"Abs": [(first, last, {})]}
        model.graph.opset_imports[""] = opset
        assert (misfits(model, table, table) == []) is fits, (opset, first, last)
