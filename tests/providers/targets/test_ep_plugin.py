"""A real plugin provider with memory of its own: WebGPU, on a software implementation of Vulkan.

The plugin is downloaded from PyPI; for the device see ``software_gpu``.
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

PLUGIN = "onnxruntime-ep-webgpu==0.4.0"
LIBRARY = "onnxruntime_ep_webgpu/libonnxruntime_providers_webgpu.so"
# This plugin's attention of 32 new tokens and more is wrong on software devices, depending on the head size.
WRONG = "computes wrong results here: logits of 32 tokens at once and one by one differ"

GENERATE = """
import sys, json
from carryall import LLM, SamplingParams
model, provider, *options = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=6)
prompts = ["hello", "a b c", "the quick brown fox jumps over the lazy dog"]
options = dict(option.split("=") for option in options)
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


@pytest.fixture(scope="module")
def library() -> Path:
    folder = zoo.folder() / "plugins"
    try:
        if not (folder / LIBRARY).is_file():
            zoo.fetch(PLUGIN, LIBRARY, folder)
    except zoo.ZooError as error:
        pytest.skip(str(error))
    return folder / LIBRARY


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code where the plugin finds a software device; libraries are looked up when a process starts."""
    if software_gpu.driver() is None:
        pytest.skip("no software Vulkan device: install mesa-vulkan-drivers 25, or set VK_ICD_FILENAMES")
    software_gpu.enable()
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
