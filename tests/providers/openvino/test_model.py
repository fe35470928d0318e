"""OpenVINO models without a provider: reading, running, and rejected models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from carryall.errors import GraphError, ModelNotFoundError, ProviderUnavailableError
from carryall.providers.openvino.model import OpenVinoSession, compile_model, open_core, present_devices, read

GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
graph (float[n, 2] x) => (float[n, 2] doubled, float[n, 2] squared)
{
    doubled = Add(x, x)
    squared = Mul(x, x)
}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ir.save(ir.from_onnx_text(GRAPH), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_outputs_come_in_the_order_asked_for(path: Path) -> None:
    core = open_core("CPU")
    session = OpenVinoSession(compile_model(core, read(core, path), "CPU", {}))
    x = np.array([[1.0, -3.0]], np.float32)
    for names, expected in (
        (None, [x + x, x * x]),
        (["squared"], [x * x]),
        (["squared", "doubled"], [x * x, x + x]),
    ):
        results = session.run(names, {"x": x})
        assert len(results) == len(expected)
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, value)


def test_results_are_copies_that_a_later_run_leaves_alone(path: Path) -> None:
    core = open_core("CPU")
    session = OpenVinoSession(compile_model(core, read(core, path), "CPU", {}))
    (first,) = session.run(["doubled"], {"x": np.ones((1, 2), np.float32)})
    session.run(["doubled"], {"x": np.zeros((1, 2), np.float32)})
    np.testing.assert_array_equal(first, np.full((1, 2), 2.0, np.float32))


def test_a_missing_device_names_those_that_are_present() -> None:
    assert "CPU" in present_devices()
    with pytest.raises(ProviderUnavailableError, match=r"GPU\.7.*CPU"):
        open_core("GPU.7")


def test_files_that_are_no_models(tmp_path: Path) -> None:
    core = open_core("CPU")
    with pytest.raises(ModelNotFoundError, match=r"gone\.onnx"):
        read(core, tmp_path / "gone.onnx")
    (tmp_path / "text.onnx").write_text("no protobuf")
    with pytest.raises(GraphError, match=r"text\.onnx"):
        read(core, tmp_path / "text.onnx")
