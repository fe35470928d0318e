"""Whatever reads a model file says what is wrong with a bad one, by a GraphError that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from graph_asserts import graph

from carryall.cli.verbs.verify import command
from carryall.errors import GraphError
from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.load import load_model, read_model
from carryall.providers.base import RunnerConfig
from carryall.providers.ort.tensorrt_options import input_shapes
from carryall.providers.placement import heavy_nodes
from carryall.providers.targets.null import NullProvider

TEXT = "g (float[1, 4] x) => (float[1, 4] y) { y = Mul(x, w) }"


def good(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    model = graph(TEXT, w=np.arange(1024, dtype=np.float32).repeat(4).reshape(1024, 4)[:1])
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=0)
    return folder / "model.onnx"


def truncated(folder: Path) -> Path:
    path = good(folder)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def text_file(folder: Path) -> Path:
    path = good(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    return path


def empty(folder: Path) -> Path:
    path = good(folder)
    path.write_bytes(b"")
    return path


def missing(folder: Path) -> Path:
    return folder / "model.onnx"


def without_weights(folder: Path) -> Path:
    path = good(folder)
    path.with_suffix(".onnx.data").unlink()
    return path


def of_the_future(folder: Path) -> Path:
    path = good(folder)
    model = ir.load(path)
    model.graph.opset_imports[""] = 999
    ir.save(model, path)
    return path


Break = Callable[[Path], Path]
UNREADABLE: dict[Break, str] = {
    truncated: "cannot be read as ONNX",
    text_file: "cannot be read as ONNX",
    empty: "is an empty file",
    missing: "does not exist",
}
INVALID: dict[Break, str] = {
    without_weights: "which does not exist",
    of_the_future: "has opset 999; the installed onnx",
}


@pytest.mark.parametrize("broken", [*UNREADABLE, *INVALID])
@pytest.mark.parametrize("second", [False, True])
def test_verify(broken: Break, second: bool, tmp_path: Path) -> None:
    paths = [good(tmp_path / "good"), broken(tmp_path / "bad")]
    with pytest.raises(GraphError, match="bad") as error:
        verify(paths[not second], paths[second])
    assert (UNREADABLE | INVALID)[broken] in str(error.value)


@pytest.mark.parametrize("broken", [each for each in (*UNREADABLE, *INVALID) if each is not missing])
def test_the_command(broken: Break, tmp_path: Path) -> None:
    paths = [str(good(tmp_path / "good")), str(broken(tmp_path / "bad"))]
    result = CliRunner().invoke(command, paths)
    assert isinstance(result.exception, GraphError)
    assert (UNREADABLE | INVALID)[broken] in str(result.exception)


@pytest.mark.parametrize(
    "read",
    [
        read_model,
        load_model,
        heavy_nodes,
        input_shapes,
        lambda path: NullProvider().runner(path, RunnerConfig(max_slots=1, context_length=8)),
    ],
    ids=["read", "load", "placement", "tensorrt", "null"],
)
@pytest.mark.parametrize("broken", [each for each in UNREADABLE if each is not missing])
def test_who_only_looks(read: Callable[[Path], object], broken: Break, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=UNREADABLE[broken]):
        read(broken(tmp_path / "bad"))
