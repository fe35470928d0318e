"""Real models out of Python packages: every method on each; slow, since they are downloaded."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from zoo import ZOO, ZooError, ZooModel

from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.quantize.any_model.options import IntegerOptions
from carryall.graph_opt.quantize.any_model.quantize import convert_half, quantize_dynamic, quantize_static
from carryall.graph_opt.quantize.any_model.samples import Samples

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)


def image(name: str, *shape: int) -> Any:
    """Draw smooth noise."""

    def make() -> dict[str, Any]:
        small = RNG.random((shape[0], shape[1], -(-shape[2] // 16), -(-shape[3] // 16)))
        large = np.kron(small, np.ones((16, 16)))[..., : shape[2], : shape[3]]
        return {name: (0.8 * large + 0.2 * RNG.random(shape)).astype(np.float32)}

    return make


def content() -> dict[str, Any]:
    """Draw the bytes of a module of the standard library."""
    files = sorted(Path(subprocess.__file__).parent.glob("*.py"))
    data = np.frombuffer(files[RNG.integers(len(files))].read_bytes() * 4, np.uint8)
    return {"bytes": np.concatenate([data[:1024], data[-1024:]]).astype(np.int32)[None]}


def speech() -> dict[str, Any]:
    """Draw noise whose loudness changes, and an empty state."""
    loudness = np.repeat(RNG.uniform(0, 0.3, 8), 5)[:, None]
    zeros = np.zeros((1, 1, 128), np.float32)
    return {"input": (loudness * RNG.standard_normal((40, 576))).astype(np.float32), "h": zeros, "c": zeros}


# By the zoo's name: what draws a sample, and the least decibels.
MODELS: dict[str, tuple[Any, float]] = {
    "magika": (content, 30),
    "silero-vad-sequence": (speech, 8),
    "ppocr-v2-cls": (image("x", 1, 3, 48, 192), 8),
    "ppocr-v4-rec": (image("x", 1, 3, 48, 96), 8),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ZooModel:
    found = next(one for one in ZOO if one.name == request.param)
    try:
        found.path()
    except ZooError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.parametrize("method", ["static", "dynamic", "fp16"])
def test_real_models_become_smaller_and_stay_near(model: ZooModel, method: str, tmp_path: Path) -> None:
    make, decibels = MODELS[model.name]
    samples = Samples([make() for _ in range(8)], "drawn samples")
    options = IntegerOptions(convolutions=True)
    source = model.path()
    if method == "fp16":
        result, report = convert_half(load_model(source), "fp16", samples)
    else:
        run = quantize_static if method == "static" else quantize_dynamic
        result, report = run(load_model(source), samples, options)
    ir.save(result, tmp_path / "small.onnx")
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)
    assert (tmp_path / "small.onnx").stat().st_size < 0.75 * source.stat().st_size
    assert report.worst_output is not None
    assert report.worst_output.snr > decibels
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    before = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    for left, right in (
        (before.get_inputs(), session.get_inputs()),
        (before.get_outputs(), session.get_outputs()),
    ):
        assert [(one.name, one.type) for one in left] == [(one.name, one.type) for one in right]
