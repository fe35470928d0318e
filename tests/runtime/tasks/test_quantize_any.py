"""``carryall.quantize_any`` as a function: arrays in memory, and a report that notebooks show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

import carryall
from carryall.errors import UsageError
from carryall.graph_opt.quantize.any_model.report import GraphQuantizationReport, OutputFidelity

NET = "g (float[N,64] x) => (float[N,64] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "wv"}
    path = tmp_path / "net.onnx"
    ir.save(graph(NET, **arrays), path)
    return path


def feeds(count: int = 4, size: int = 64) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((2, size)).astype(np.float32)} for _ in range(count)]


def test_arrays_in_memory_are_calibrated_on(net: Path, tmp_path: Path) -> None:
    found = carryall.quantize_any(net, tmp_path / "out.onnx", calibration=feeds())
    assert found.samples == "given tensors"
    assert found.outputs["y"].snr > 25
    assert set(found.layer_errors) == {"w", "v"}
    with pytest.raises(UsageError, match="no calibration sample"):
        carryall.quantize_any(net, tmp_path / "two.onnx", calibration=[])
    with pytest.raises(UsageError, match="sample 0"):
        carryall.quantize_any(net, tmp_path / "two.onnx", calibration=feeds(size=63))


def test_the_report_is_a_table_in_a_notebook_and_strict_json() -> None:
    report = GraphQuantizationReport(
        method="int8-static",
        samples="2 <files>",
        layer_errors={"w": 0.01, "v": 0.2},
        left_float={"a": "is small", "b": "is small"},
        outputs={"y": OutputFidelity(math.inf, 1.0, 0.0)},
        time=0.5,
        notes=["one", "two"],
        path="out.onnx",
    )
    page = report._repr_html_()
    ET.fromstring(page)  # noqa: S314 -- ours
    assert "2 &lt;files&gt;" in page
    text = str(report)
    for part in ("2 x is small", "20 % at v", "0.50 of the float", "one", "two", "out.onnx"):
        assert part in text
    assert json.loads(report.to_json())["outputs"]["y"]["snr"] is None
