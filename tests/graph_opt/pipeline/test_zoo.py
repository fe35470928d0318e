"""Downloaded models of PyPI packages are optimized with equal results and are not larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from zoo import ZOO, ZooError, ZooModel

from carryall.cli import carryall
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.pipeline.kind import not_generating
from carryall.runtime.api.session import InferenceSession

pytestmark = pytest.mark.slow
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
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        largest = float(
            np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=0)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=max(largest, 1e-6) * model.tolerance)
