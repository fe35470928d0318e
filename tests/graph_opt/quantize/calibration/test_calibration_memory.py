"""Calibration on four times the text needs no more memory, measured as the process's peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_package

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 32,
}
FEW, MANY = 16, 64  # windows of 256 tokens
HELD = 4 << 20
KEPT = 4 * FEW * 256 * (128 + 512) * 2  # bytes between two stages if all of the short text were held

# A separate process, because the peak includes onnxruntime's allocations and never decreases.
SCRIPT = """
import sys, tempfile
from pathlib import Path
import numpy as np
from carryall.runtime.process.memory import peak_memory
from carryall.exporter.package import Package
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.search.calibrated import CALIBRATED, quantize_layers
from carryall.graph_opt.quantize.search.ranges import input_histograms
from carryall.graph_opt.quantize.algorithms.smooth import largest_activations
from carryall.graph_opt.quantize.formats.weight_only import WeightFormats

package, method, held = Package.open(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
texts = [
    [np.random.default_rng(i).integers(0, 256, 256) for i in range(int(count))] for count in sys.argv[4:]
]


def calibrate(windows):
    if method in CALIBRATED:
        with tempfile.TemporaryDirectory() as folder:
            quantize_layers(
                package.load(), CALIBRATED[method], WeightFormats(BlockFormat()), windows, Path(folder),
                context_length=256, max_bytes=held,
            )
    else:
        measure = {"static": input_histograms, "smooth": largest_activations}[method]
        measure(package.path / "model.onnx", windows, context_length=256)


for windows in (texts[0], *texts):  # once to warm up
    calibrate(windows)
    print(peak_memory())  # not ru_maxrss, which begins with that of the parent on Linux
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    checkpoint = write_tiny("llama", folder / "checkpoint", max_position_embeddings=256, **SIZES)
    return export_package(checkpoint, folder / "package").path


def growth(package: Path, method: str, held: int) -> int:
    """Return the additional peak bytes of the long text over the short text."""
    command = [sys.executable, "-c", SCRIPT, str(package), method, str(held), str(FEW), str(MANY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, few, many = map(int, done.stdout.split())
    return many - few


@pytest.mark.long
@pytest.mark.parametrize(
    "method", ["static", "smooth", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "gptq"))]
)
def test_more_text_needs_no_more_memory(package: Path, method: str) -> None:
    assert growth(package, method, HELD) < KEPT / 2


@pytest.mark.slow
def test_keeping_all_activations_is_detected(package: Path) -> None:
    assert growth(package, "gptq", 1 << 30) > 1.5 * KEPT
