"""``carryall quantize`` on ONNX files that are not decoders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from graph_asserts import graph
from PIL import Image

from carryall.cli import carryall
from carryall.runtime.tasks.quantize_any import is_any_model

NET = """g (float[N,3,16,16] x) => (float[N,16] y) { c = Conv(x, w, b) r = Relu(c) p = GlobalAveragePool(r)
    f = Flatten(p) y = MatMul(f, v) }"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((32, 3, 7, 7)) * 0.1, "b": rng.standard_normal(32)}
    arrays["v"] = rng.standard_normal((32, 16))
    path = tmp_path / "net.onnx"
    ir.save(graph(NET, **{name: array.astype(np.float32) for name, array in arrays.items()}), path)
    return path


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    folder, rng = tmp_path / "samples", np.random.default_rng(1)
    folder.mkdir()
    for number in range(4):
        np.savez(folder / f"{number}.npz", x=rng.standard_normal((1, 3, 16, 16)).astype(np.float32))
    return folder


def call(*arguments: Any) -> str:
    """Run the verb, check that it succeeds, and return its output."""
    result = CliRunner().invoke(carryall, ["quantize", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: Any) -> str:
    """Run the verb, check that it fails with exit code 2 and one line, and return the line."""
    result = CliRunner().invoke(carryall, ["quantize", *map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("method", ["int8-static", "int8-dynamic", "fp16"])
def test_a_file_becomes_a_smaller_one(method: str, net: Path, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    of_int8 = () if method == "fp16" else ("--dynamic-conv", "--exclude", "no")
    facts = json.loads(call(net, out, "--method", method, "--calibration", samples, "--json", *of_int8))
    assert facts["method"] == method
    assert facts["bytes_after"] == out.stat().st_size < 0.6 * facts["bytes_before"]
    assert facts["samples"] == "4 .npz files of samples"
    assert facts["outputs"]["y"]["snr"] > 25
    onnx.checker.check_model(out, full_check=True)
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (net, out)]
    feed = {"x": np.random.default_rng(2).standard_normal((2, 3, 16, 16)).astype(np.float32)}
    exact, found = (session.run(None, feed)[0] for session in sessions)
    assert 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum()) > 25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "out.onnx", "samples"]


def test_images_and_a_report(net: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 20, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(photos / f"{number}.png")
    options = ["--image-mean", "0.5", "--image-std", "0.5,0.5,0.5", "--report", tmp_path / "report.json"]
    shown = call(net, tmp_path / "out.onnx", "--method", "int8-static", "--calibration", photos, *options)
    rows = dict(re.split(r":\s+", line, maxsplit=1) for line in shown.splitlines() if ": " in line)
    assert rows["calibrated on"].startswith("4 images of photos (3 channels, 16 x 16, NCHW")
    assert rows["method"] == "int8-static"
    assert "out.onnx, " in rows["written"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["layer_errors"]) == {"w", "v"}


def test_without_samples_the_result_says_so(net: Path, tmp_path: Path) -> None:
    shown = call(net, tmp_path / "out.onnx", "--method", "int8-static", "--calibrator", "minmax", "-q")
    assert "warning: no samples were given; ranges and errors are those of random tensors" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image-std", "0.5"], "--image options have no effect without --calibration"),
        (["--report", "report.html"], "JSON: name it report.json"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str], message: str, net: Path, tmp_path: Path
) -> None:
    assert message in refusal(net, tmp_path / "out.onnx", "--method", "int8-static", *options)
    assert not (tmp_path / "out.onnx").exists()


def test_a_failure_leaves_no_files(net: Path, samples: Path, tmp_path: Path) -> None:
    np.savez(samples / "9.npz", x=np.full((1, 3, 16, 16), np.nan, np.float32))
    assert re.search(
        r"9\.npz: input x holds NaN or infinity",
        refusal(net, tmp_path / "out.onnx", "--method", "int8-static", "--calibration", samples),
    )
    (samples / "9.npz").unlink()
    (tmp_path / "out.onnx").write_text("kept")
    assert re.search(
        r"out\.onnx exists",
        refusal(net, tmp_path / "out.onnx", "--method", "int8-static", "--calibration", samples),
    )
    assert (tmp_path / "out.onnx").read_text() == "kept"
    assert re.search(
        r"so the output must be one too: name it \S+folder\.onnx",
        refusal(net, tmp_path / "folder", "--method", "int8-static", "--calibration", samples),
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert re.search(
        "holds no calibration sample",
        refusal(net, tmp_path / "new.onnx", "--method", "fp16", "--calibration", empty),
    )
    assert not (tmp_path / "new.onnx").exists()


def test_a_model_that_would_grow_is_refused(tmp_path: Path) -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { y = MatMul(x, w) }"
    ir.save(graph(text, w=np.eye(4, dtype=np.float32)), tmp_path / "tiny.onnx")
    assert re.search(
        r"its scales would need more bytes|would be larger",
        refusal(tmp_path / "tiny.onnx", tmp_path / "out.onnx", "--method", "int8-static", "-q"),
    )
    assert not (tmp_path / "out.onnx").exists()


def test_decoders_go_their_own_way(net: Path, samples: Path, tmp_path: Path) -> None:
    assert is_any_model(str(net), "int8-static")
    assert not is_any_model(str(net), "int4")
    assert not is_any_model("demo", "int8-static")
    assert re.search(
        "--min-snr is for ONNX files that are not decoders",
        refusal("demo", tmp_path / "out", "--method", "int8-static", "--min-snr", "30"),
    )
    assert re.search(
        "a decoder is calibrated on a text",
        refusal("demo", tmp_path / "out", "--method", "int8-static", "--calibration", samples),
    )
