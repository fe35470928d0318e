"""The operators over ranks: sums that are equal to the bit, joined parts, and ranks that do not come."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from carryall.providers.native.library import find_library
from carryall.providers.runners.ranks_memory import RanksMemory

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built"),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks need POSIX"),
]

RUN = """
import sys
import numpy as np
import onnxruntime as ort
library, model, values, results = sys.argv[1:]
options = ort.SessionOptions()
options.register_custom_ops_library(library)
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
try:
    outputs = [session.run(None, {"x": x})[0] for x in np.load(values).values()]
except Exception as error:
    sys.exit(str(error))
np.savez(results, *outputs)
"""


def write_model(path: Path, operator: str, **attributes: int) -> Path:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node(operator, [x], attributes, domain="carryall")
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], node.outputs, nodes=[node], name="g", opset_imports={"": 23, "carryall": 1})
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def start(
    folder: Path, memory: RanksMemory, rank: int, values: list[npt.NDArray[np.float32]], model: Path
) -> subprocess.Popen[str]:
    np.savez(folder / f"values{rank}.npz", *values)
    library, out = find_library(), folder / f"results{rank}.npz"
    files = [str(library), str(model), str(folder / f"values{rank}.npz"), str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *files], env=variables(memory), stderr=subprocess.PIPE, text=True
    )


def variables(memory: RanksMemory) -> Mapping[str, str]:
    return {"PATH": "/usr/bin:/bin", **memory.variables}


def results(folder: Path, rank: int) -> list[npt.NDArray[np.float32]]:
    with np.load(folder / f"results{rank}.npz") as stored:
        return list(stored.values())


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_sums_are_those_in_the_order_of_ranks_on_every_rank(count: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = [(3, 5), (300_001,), (0, 4), (2, 7)]  # the second is longer than a buffer
    values = [
        [(random.normal(size=shape) * 10.0 ** random.integers(-3, 4)).astype(np.float32) for shape in shapes]
        for _ in range(count)
    ]
    memory = RanksMemory(count, 30)
    try:
        children = []
        for rank in range(count):
            model = write_model(tmp_path / f"{rank}.onnx", "AllReduce", rank=rank, ranks=count, number=1)
            children.append(start(tmp_path, memory, rank, values[rank], model))
        assert [child.communicate()[1] for child in children] == [""] * count
        assert memory.in_step()
    finally:
        memory.close()
    for index in range(len(shapes)):
        expected = values[0][index].copy()
        for rank in range(1, count):
            expected += values[rank][index]
        for rank in range(count):
            assert np.array_equal(results(tmp_path, rank)[index], expected)


@pytest.mark.long
def test_parts_of_different_widths_are_joined(tmp_path: Path) -> None:
    parts = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(10, dtype=np.float32).reshape(2, 5)]
    memory = RanksMemory(2, 30)
    try:
        children = []
        for rank, part in enumerate(parts):
            name = tmp_path / f"{rank}.onnx"
            model = write_model(name, "AllGather", rank=rank, ranks=2, number=1, whole=8)
            children.append(start(tmp_path, memory, rank, [part], model))
        assert [child.communicate()[1] for child in children] == ["", ""]
    finally:
        memory.close()
    for rank in range(2):
        assert np.array_equal(results(tmp_path, rank)[0], np.concatenate(parts, axis=1))


@pytest.mark.long
@pytest.mark.parametrize(("ends", "error"), [(False, "did not arrive within 300 ms"), (True, "has ended")])
def test_a_rank_that_does_not_come_is_an_error_in_time(ends: bool, error: str, tmp_path: Path) -> None:
    memory = RanksMemory(2, 60 if ends else 0.3)
    try:
        if ends:
            memory.end()
        model = write_model(tmp_path / "0.onnx", "AllReduce", rank=0, ranks=2, number=1)
        alone = start(tmp_path, memory, 0, [np.ones(3, np.float32)], model)
        assert error in alone.communicate(timeout=30)[1]
        assert not memory.in_step()
    finally:
        memory.close()


@pytest.mark.long
def test_ranks_that_run_other_operators_are_refused(tmp_path: Path) -> None:
    memory = RanksMemory(2, 30)
    try:
        children = []
        for rank in range(2):
            name = tmp_path / f"{rank}.onnx"
            model = write_model(name, "AllReduce", rank=rank, ranks=2, number=rank)
            children.append(start(tmp_path, memory, rank, [np.ones(3, np.float32)], model))
        for child in children:
            assert "runs another operator or size" in child.communicate(timeout=30)[1]
    finally:
        memory.close()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_part_alone_or_with_the_memory_of_others_is_refused(ranks: int, tmp_path: Path) -> None:
    memory = RanksMemory(3, 30)
    model = write_model(tmp_path / "0.onnx", "AllReduce", rank=0, ranks=ranks, number=1)
    try:
        if ranks == 3:
            memory.path.unlink()
        alone = start(tmp_path, memory, 0, [np.ones(3, np.float32)], model)
        assert "memory of the ranks" in alone.communicate(timeout=30)[1]
    finally:
        memory.close()
