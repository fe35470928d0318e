"""Real plugins: WebGPU on Vulkan in software, ggml and OpenVINO on the CPU, Qualcomm's simulator of its NPU.

The plugins are downloaded from PyPI; for the device of WebGPU see ``software_gpu``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import software_gpu
import zoo
from tiny_models import write_tiny

from carryall.exporter.export import export_package

pytestmark = pytest.mark.slow

WEBGPU = ("onnxruntime-ep-webgpu==0.4.0", "onnxruntime_ep_webgpu/libonnxruntime_providers_webgpu.so")
GGML = ("onnxruntime-ggml==0.2.0", "onnxruntime_ggml/lib/libonnxruntime_ggml.so")
OPENVINO = (
    "onnxruntime-ep-openvino==1.8.1",
    "onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so",
)
RTX = (
    "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0",
    "onnxruntime_ep_nv_tensorrt_rtx/libonnxruntime_providers_nv_tensorrt_rtx.so",
)
QNN = ("onnxruntime-qnn==2.7.0", "onnxruntime_qnn/libonnxruntime_providers_qnn.so")
# This plugin's attention of 32 new tokens and more is wrong on software devices, depending on the head size.
WRONG = "computes wrong results here: logits of"

GENERATE = """
import sys, json
from carryall import LLM, SamplingParams
model, provider, *options = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=6)
prompts = ["hello", "a b c", "the quick brown fox jumps over the lazy dog"]
options = dict(option.split("=", 1) for option in options)
options = {name: int(value) if value.isdigit() else value for name, value in options.items()}
with LLM(model, provider=provider, max_slots=2, provider_options=options) as llm:
    print(json.dumps([result.outputs[0].token_ids for result in llm.generate(prompts, params)]))
"""

ANY_MODEL = """
import sys
import numpy as np
from onnx_ir import from_onnx_text
from carryall import InferenceSession
text = '''<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 3, 16, 16] x) => (float[1, 4, 16, 16] y)
<float[4, 3, 3, 3] w = {%s}> { c = Conv<pads=[1, 1, 1, 1]>(x, w)  y = Relu(c) }'''
numbers = np.random.default_rng(0).standard_normal(108)
model = from_onnx_text(text % ", ".join(map(str, numbers)))
x = np.zeros((1, 3, 16, 16), np.float32)
y = np.zeros((1, 4, 16, 16), np.float32)
cpu = InferenceSession(model, providers=["cpu"])
device = InferenceSession(model, providers=["ep:" + sys.argv[1]])
bound = device.bind({"x": x}, {"y": y})
for seed in range(3):
    x[...] = np.random.default_rng(seed).standard_normal(x.shape)
    (expected,) = cpu.run(None, {"x": x})
    bound.run()
    np.testing.assert_allclose(y, expected, atol=1e-4)
    np.testing.assert_allclose(device.run(None, {"x": x})[0], expected, atol=1e-4)
"""


ONE_RUN = (
    ANY_MODEL.split("device =")[0]
    + """
import onnx_ir as ir, tempfile
from pathlib import Path
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
settings = dict([sys.argv[2].split("=", 1)])
with tempfile.TemporaryDirectory() as folder:
    ir.save(model, Path(folder) / "model.onnx")
    provider = get_provider("ep:" + sys.argv[1])
    device = provider.session(Path(folder) / "model.onnx", RunnerConfig(options=settings))
x[...] = np.random.default_rng(0).standard_normal(x.shape)
np.testing.assert_allclose(device.run(None, {"x": x})[0], cpu.run(None, {"x": x})[0], atol=1e-4)
"""
)


def plugin(requirement: str, library: str) -> Path:
    """Return the library of a package, which is downloaded once with its other files."""
    folder = zoo.folder() / "plugins" / requirement
    try:
        if not (folder / library).is_file():
            zoo.install(requirement, folder)
    except zoo.ZooError as error:
        pytest.skip(str(error))
    return folder / library


@pytest.fixture(scope="module")
def library() -> Path:
    """Return the plugin of WebGPU; skip without a software device."""
    if software_gpu.driver() is None:
        pytest.skip("no software Vulkan device: install mesa-vulkan-drivers 25, or set VK_ICD_FILENAMES")
    software_gpu.enable()
    return plugin(*WEBGPU)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: libraries are looked up when a process starts."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_decoders_on_device_memory(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    package = export_package(write_tiny("qwen3", tmp_path / "checkpoint"), tmp_path / "package").path
    expected = json.loads(python(GENERATE, package, "cpu").stdout)
    short = python(GENERATE, package, f"ep:{library}", "lowering=slots", "prefill_chunk=16")
    assert short.returncode == 0, short.stderr
    assert json.loads(short.stdout) == expected
    whole = python(GENERATE, package, f"ep:{library}", "lowering=slots")
    if whole.returncode:
        assert WRONG in whole.stderr
    else:
        assert json.loads(whole.stdout) == expected


def test_any_model_on_device_memory(library: Path) -> None:
    done = python(ANY_MODEL, library)
    assert done.returncode == 0, done.stderr


def test_decoders_on_ggml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of the standard lowering run there; ONNX Runtime's own kernels are refused."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    ggml = plugin(*GGML)
    package = export_package(write_tiny("qwen3", tmp_path / "checkpoint"), tmp_path / "package").path
    expected = json.loads(python(GENERATE, package, "cpu").stdout)
    done = python(GENERATE, package, f"ep:{ggml}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    slots = python(GENERATE, package, f"ep:{ggml}", "lowering=slots")
    assert "cannot run on" in slots.stderr
    assert "GroupQueryAttention" in slots.stderr


def test_any_model_on_the_simulator_of_qnn(tmp_path: Path) -> None:
    qnn = plugin(*QNN)
    settings = f"settings=backend_path={qnn.with_name('libQnnHtp.so')}"
    done = python(ONE_RUN, qnn, settings)
    assert done.returncode == 0, done.stderr
    twice = python(f"{ONE_RUN}\n", qnn, "settings=")
    assert "ProviderUnavailableError" in twice.stderr
    assert "Could not determine default backend path" in twice.stderr


def test_decoders_and_any_model_on_openvinos_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it computes in the device's own precision, bf16 where the processor has it."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    openvino = plugin(*OPENVINO)
    package = export_package(write_tiny("qwen3", tmp_path / "checkpoint"), tmp_path / "package").path
    expected = json.loads(python(GENERATE, package, "cpu").stdout)
    exact = 'load_config={"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}'
    done = python(GENERATE, package, f"ep:{openvino}", f"settings={exact}")
    if "has no device on this machine" in done.stderr and "(Intel" not in done.stderr:
        pytest.skip("the plugin offers Intel's devices only")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    done = python(ONE_RUN, openvino, f"settings={exact}")
    assert done.returncode == 0, done.stderr


def test_a_plugin_that_lacks_a_library_says_so_each_time() -> None:
    """TensorRT for RTX needs NVIDIA's driver; where there is one, its package is no subject of this test."""
    code = """
import sys
from pathlib import Path
from carryall.errors import ProviderUnavailableError
from carryall.providers.ort.plugins import plugin_devices
for _ in range(3):
    try:
        plugin_devices(Path(sys.argv[1]))
    except ProviderUnavailableError as error:
        print(error)
"""
    done = python(code, plugin(*RTX))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if not lines:
        pytest.skip("NVIDIA's driver is installed")
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert "libcuda" in lines[0] or "has no device on this machine" in lines[0]
