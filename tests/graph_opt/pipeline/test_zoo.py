"""Downloaded models of PyPI packages are optimized with equal results and are not larger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from openvino_process import OpenVinoProcess
from zoo import ZOO, ZooError, ZooModel

from carryall.cli import carryall
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.pipeline.kind import not_generating
from carryall.runtime.api.session import InferenceSession

pytestmark = pytest.mark.slow
Array = npt.NDArray[Any]
_ENTRY_BYTES = 100  # bytes of a node or a weight in addition to its content: names, shapes, location
_FIXED_BYTES = 2000


@pytest.fixture(params=ZOO, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> ZooModel:
    found: ZooModel = request.param
    try:
        found.path()
    except ZooError as error:
        pytest.skip(str(error))
    return found


def run(path: Path, feed: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    found: list[Any] = InferenceSession(str(path), options, providers=["cpu"]).run(None, feed)
    return found


def size(path: Path) -> int:
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def count(path: Path) -> tuple[int, int]:
    """Return the numbers of nodes and of weights."""
    graph = onnx.load(path, load_external_data=False).graph
    return len(graph.node), len(graph.initializer)


def test_none_is_a_decoder(model: ZooModel) -> None:
    assert not_generating(load_model(model.path())) is not None


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_it_is_equal_and_no_larger(model: ZooModel, target: str, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    arguments = ["optimize", str(model.path()), str(out), "--target", target]
    result = CliRunner().invoke(carryall, arguments)
    assert result.exit_code == 0, result.output
    source = model.path()
    assert count(out)[0] <= count(source)[0]
    assert size(out) <= size(source) + _ENTRY_BYTES * sum(count(source)) + _FIXED_BYTES
    load_model(out)
    feed = model.feed()
    for expected, found in zip(run(source, feed), run(out, feed), strict=True):
        if isinstance(expected, list):  # of maps
            assert found == expected
            continue
        assert_close(found, expected, model.tolerance)


def assert_close(found: Array, expected: Array, tolerance: float) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    largest = float(np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=max(largest, 1e-6) * tolerance)


def as_written(path: Path, feed: dict[str, Any]) -> list[Any]:
    """Return the results of onnxruntime without its optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feed)
    return found


@pytest.fixture(scope="module")
def openvino() -> Iterator[OpenVinoProcess]:
    """OpenVINO's CPU plugin with its transformations; some graphs end the process."""
    pytest.importorskip("openvino")
    with OpenVinoProcess() as process:
        yield process


def test_a_session_gives_the_results_of_the_graph_as_written(model: ZooModel) -> None:
    """onnxruntime's fusions are on in the session; those that are wrong about a graph are left out."""
    if model.quantized:
        pytest.skip("onnxruntime's kernels of integers round other values than the graph as written")
    feed = model.feed()
    for expected, found in zip(as_written(model.path(), feed), run(model.path(), feed), strict=True):
        if isinstance(expected, list):
            assert found == expected
        else:
            assert_close(found, expected, max(model.tolerance, 1e-4))


@pytest.mark.parametrize("target", ["portable", "openvino"])
def test_openvino_is_as_right_about_it(
    model: ZooModel, target: str, openvino: OpenVinoProcess, tmp_path: Path
) -> None:
    """Where OpenVINO's transformations keep the source's numbers, they keep the optimized graph's."""
    feed, expected = model.feed(), as_written(model.path(), model.feed())
    if any(isinstance(result, list) for result in expected):
        pytest.skip("OpenVINO has no maps")
    tolerance = max(10 * model.tolerance, 1e-3)
    source = openvino.results(model.path(), feed)
    if source is None:
        pytest.skip("OpenVINO refuses the source, or ends")
    try:
        for wanted, found in zip(expected, source, strict=True):
            assert_close(found.astype(wanted.dtype), wanted, tolerance)
    except AssertionError as error:
        pytest.skip(f"OpenVINO gives other numbers for the source: {str(error)[:200]}")
    out = tmp_path / "out.onnx"
    result = CliRunner().invoke(carryall, ["optimize", str(model.path()), str(out), "--target", target])
    assert result.exit_code == 0, result.output
    optimized = openvino.results(out, feed)
    assert optimized is not None, "OpenVINO takes the source, and not the optimized graph"
    for wanted, found in zip(expected, optimized, strict=True):
        assert_close(found.astype(wanted.dtype), wanted, tolerance)
