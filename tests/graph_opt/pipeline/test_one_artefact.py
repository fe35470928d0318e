"""A package of any quantization method gives the same results on every target.

The oracle is ONNX's reference evaluator. Targets without kernels for integer products, 16 bits or an 8-bit
cache compute with the stored weights in fp32; for them the oracle evaluates the float graph with those
weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from device_stand_ins import CudaOnCpu, DirectMLOnCpu, TensorRTOnCpu
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from processor import needs_vnni
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

from carryall.cli import carryall
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers.base import Provider, Row, RunnerConfig
from carryall.providers.targets.cpu import CpuProvider
from carryall.providers.targets.directml import DirectMLProvider
from carryall.providers.targets.openvino import OpenVinoOptions, OpenVinoProvider

TOKENS = np.random.default_rng(0).integers(0, 256, 24)
SAMPLE = bytes(range(32, 127)).decode() * 20  # calibration text
EXACT = 2e-6  # relative error of logits: fp32 sums in another order
Logits = npt.NDArray[np.float64]
Quantize = Callable[[str], Package]


class FloatCpu(CpuProvider):
    """The CPU provider with float activations; its default kernels and fusions round them to int8."""

    kernels = dataclasses.replace(CPU, accuracy_level=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatOpenVinoOptions(OpenVinoOptions):
    dynamic_quantization_group: int | Literal["auto"] = 0
    kv_cache: Literal["auto", "int8", "float32"] = "float32"


class FloatOpenVino(OpenVinoProvider):
    options: ClassVar[type[Any]] = FloatOpenVinoOptions


class FloatTensorRT(TensorRTOnCpu):
    def session_entries(self, options: Mapping[str, Any]) -> dict[str, str]:
        return {"session.qdq_matmulnbits_accuracy_level": "1"}


TARGETS: dict[str, type[Provider]] = {
    "cpu": FloatCpu,
    "openvino": FloatOpenVino,
    "cuda": CudaOnCpu,
    "directml": DirectMLOnCpu,
    "tensorrt": FloatTensorRT,
}


class Method(NamedTuple):
    """Options, the storage of a layer, its bits including scales and zero points, and the fp32 targets.

    ``rounding`` is the allowed error of rounding other than of weights: of activations, tables or the cache.
    """

    options: str
    dtype: str
    bits: float
    fp32: str = ""
    rounding: float = EXACT


METHODS = {
    "int4": Method(
        "--method int4-fast --algorithm rtn --symmetric --embedding int4 --promote 0", "INT4", 4 + 32 / 32
    ),
    "int4-fast": Method("--method int4-fast", "UINT4 INT8", 7),
    "awq+gptq": Method("--promote 0 --algorithm awq+gptq", "UINT4", 4 + 36 / 32),
    "gptq": Method("--promote 0", "UINT4", 4 + 36 / 32),
    "awq": Method("--method int4-fast --algorithm awq --promote 0", "UINT4", 4 + 36 / 32),
    "int8": Method("--method int8-fast", "INT8", 8 + 32 / 32),
    "int8-dynamic": Method("--method int8-dynamic", "INT8", 8.5, "openvino cuda directml tensorrt", 0.05),
    "int8-static": Method("--method int8-static", "INT8", 8.5, "openvino cuda directml", 0.08),
    "bf16": Method("--method bf16", "BFLOAT16", 16, "cpu openvino cuda directml tensorrt", 0.02),
    "fp16": Method("--method fp16", "FLOAT16", 16, "cpu openvino cuda directml tensorrt", 0.003),
    "kv": Method("--method none --kv int8", "FLOAT", 32, "openvino directml", 0.05),
}


@pytest.fixture(scope="module")
def float_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Return a package of a model whose layers do not amplify rounding errors."""
    folder = tmp_path_factory.mktemp("float")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    checkpoint = write_tiny("llama", folder / "checkpoint", **sizes)
    weights = load_file(checkpoint / "model.safetensors")
    for name, value in weights.items():
        if value.ndim == 2 and "embed" not in name:
            weights[name] = (value * (2.5 / math.sqrt(value.shape[1]))).astype(value.dtype)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return export_package(checkpoint, folder / "package")


@pytest.fixture(scope="module")
def quantized(float_package: Package, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    folder = tmp_path_factory.mktemp("quantized")
    text = folder / "text.txt"
    text.write_text(SAMPLE)

    @functools.cache
    def quantize(method: str) -> Package:
        words = METHODS[method].options.split()
        if method in ("gptq", "awq", "awq+gptq", "int8-static", "kv"):
            words += ["--calibration", str(text)]
        arguments = ["quantize", str(float_package.path), str(folder / method), *words, "--quiet"]
        result = CliRunner().invoke(carryall, arguments)
        assert result.exit_code == 0, result.output
        return Package.open(folder / method)

    return quantize


def evaluated(model: onnx.ModelProto) -> Logits:
    """Return the results of ONNX's reference evaluator."""
    count = len(TOKENS)
    feed: dict[str, Any] = {
        "input_ids": TOKENS[None],
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
    }
    for value in model.graph.input:
        if value.name.startswith("past_key_values."):
            kind = value.type.tensor_type
            sizes = [dim.dim_value for dim in kind.shape.dim]
            dtype = ir.DataType(kind.elem_type).numpy()
            feed[value.name] = np.zeros((1, sizes[1], 0, sizes[3]), dtype)
    with np.errstate(over="ignore"):  # masks of the lowest half
        results: Any = ReferenceEvaluator(model).run(["logits"], feed)
    return np.asarray(results[0][0], np.float64)


def with_weights_of(stored: onnx.ModelProto, package: Package) -> onnx.ModelProto:
    """Return the float graph with the dequantized weights of ``stored``."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in stored.graph.initializer}
    casts = (node for node in stored.graph.node if node.op_type == "Cast" and node.input[0] in tensors)
    tensors |= {node.output[0]: tensors[node.input[0]] for node in casts}
    model = onnx.load(package.path / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        parts = [tensors.get(f"{tensor.name}.{part}") for part in ("values", "scales", "zero_points")]
        value = tensors[tensor.name] if parts[0] is None else decoded(*parts)
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    return model


def decoded(values: Any, scales: Any, zero_points: Any) -> npt.NDArray[np.float32]:
    """Return (values - zero_points) * scales, with one scale per block or per column."""

    def spread(part: Any) -> npt.NDArray[np.float32]:
        part = np.atleast_2d(part.astype(np.float32))
        for axis, size in enumerate(values.shape):
            part = np.repeat(part, size // part.shape[axis], axis)
        return np.asarray(part)

    levels = values.astype(np.float32)
    if zero_points is not None:
        levels -= spread(zero_points)
    return np.asarray(levels * spread(scales))


def logits_on(provider: Provider, package: Package, folder: Path) -> Logits:
    """Lower, load and run."""
    config = RunnerConfig(max_slots=1, context_length=64, num_threads=1)
    lowered, _ = run(package.load(), provider.passes(config))
    folder.mkdir()
    save_model(lowered, folder / "model.onnx")
    runner = provider.runner(folder / "model.onnx", config)
    try:
        (logits,) = runner.forward([Row(0, TOKENS, 0, num_logits=len(TOKENS))])
        return logits.astype(np.float64)
    finally:
        runner.close()


def error(found: Logits, expected: Logits) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_a_package_gives_equal_results_on_every_target(
    name: str, quantized: Quantize, float_package: Package, tmp_path: Path
) -> None:
    method, package = METHODS[name], quantized(name)
    stored = onnx.load(package.path / "model.onnx")
    as_stored, in_fp32 = evaluated(stored), evaluated(with_weights_of(stored, float_package))
    assert error(as_stored, in_fp32) < method.rounding
    for target, provider in TARGETS.items():
        expected = in_fp32 if target in method.fp32.split() else as_stored
        found = logits_on(provider(), package, tmp_path / target)
        assert error(found, expected) < EXACT, target


@needs_vnni  # OpenVINO computes in floats without it
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_both_processors_round_activations_alike(name: str, quantized: Quantize, tmp_path: Path) -> None:
    """By default both kernels quantize activations to int8, in groups of the block size."""
    package = quantized(name)
    expected = evaluated(onnx.load(package.path / "model.onnx"))
    cpu, openvino = (
        logits_on(provider(), package, tmp_path / provider.name)
        for provider in (CpuProvider, OpenVinoProvider)
    )
    assert error(cpu, openvino) < EXACT
    assert EXACT < error(cpu, expected) < 0.03


@pytest.mark.parametrize("name", METHODS)
def test_weights_have_the_documented_size_on_disk(
    name: str, quantized: Quantize, float_package: Package
) -> None:
    method, package = METHODS[name], quantized(name)
    floats = float_package.load().graph.initializers
    layers = {
        name: math.prod(value.shape.numpy() if value.shape else ())
        for name, value in floats.items()
        if "_proj" in name
    }
    stored = [value for value in package.load().graph.initializers.values() if "_proj" in str(value.name)]
    values = [value for value in stored if str(value.name).removesuffix(".values") in layers]
    assert len(values) == len(layers)
    assert {str(value.dtype) for value in values} == set(method.dtype.split())
    nbytes = sum(value.const_value.nbytes for value in stored if value.const_value)
    assert 8 * nbytes / sum(layers.values()) <= method.bits
    file = package.path / "model.onnx.data"
    shortened = (float_package.path / "model.onnx.data").stat().st_size - file.stat().st_size
    assert shortened >= sum(layers.values()) * (4 - method.bits / 8)


def test_bf16_becomes_fp16_where_there_are_no_kernels_for_it(quantized: Quantize) -> None:
    lowered, _ = run(quantized("bf16").load(), DirectMLProvider().passes(RunnerConfig(context_length=64)))
    inputs = [value for value in lowered.graph.inputs if str(value.name).startswith("past_key_values.")]
    types = {value.dtype for value in (*lowered.graph.initializers.values(), *inputs)}
    assert ir.DataType.FLOAT16 in types
    assert ir.DataType.BFLOAT16 not in types
