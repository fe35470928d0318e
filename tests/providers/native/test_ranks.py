"""The operators over ranks: sums that are equal to the bit, joined parts, and ranks that do not come."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from operator_calls import experts_attributes
from quantized_experts_reference import random_experts

from carryall.graph_opt.lower.chain.program import JOIN, SUM, VERSION
from carryall.graph_opt.lower.products.tiles import LAYOUT
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


def write_model(
    path: Path,
    operator: str,
    before: Sequence[npt.NDArray[Any]] = (),
    after: Sequence[npt.NDArray[Any] | None] = (),
    **attributes: float,
) -> Path:
    """Write a graph of one operator on x, with constants before x and after it."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    inputs: list[ir.Value | None] = [x]
    for place, arrays in ((0, before), (1, after)):
        for array in reversed(arrays):
            name = f"c{len(inputs)}"
            constant = None if array is None else ir.Value(name=name, const_value=ir.tensor(array, name=name))
            inputs.insert(place, constant)
    node = ir.node(operator, inputs, attributes, domain="carryall")
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    constants = [value for value in inputs if value is not None and value is not x]
    opsets = {"": 23, "carryall": 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=constants, name="g", opset_imports=opsets)
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
def test_a_chain_adds_and_joins_as_the_operators_do(tmp_path: Path) -> None:
    """The first rows are longer than a buffer."""
    random = np.random.default_rng(1)
    values = [
        [random.normal(size=(rows, width)).astype(np.float32) for rows in (40_000, 0)] for width in (4, 5)
    ]
    memory = RanksMemory(2, 30)
    try:
        children = []
        for rank, width in enumerate((4, 5)):
            steps = [*(JOIN, -2, 0, 1), *(SUM, -1, -2, 2)]
            program = np.array([VERSION, LAYOUT, 2, 0, 2, 1, 2, 9, 9, *steps], np.int64)
            model = write_model(tmp_path / f"{rank}.onnx", "Chain", [program], rank=rank, ranks=2)
            children.append(start(tmp_path, memory, rank, values[rank], model))
            assert values[rank][0].shape[1] == width
        assert [child.communicate()[1] for child in children] == ["", ""]
    finally:
        memory.close()
    for index in range(2):
        joined = np.concatenate([values[rank][index] for rank in range(2)], axis=1)
        for rank in range(2):
            assert np.array_equal(results(tmp_path, rank)[index], joined + joined)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "steps", "error"), [
    (0, (JOIN, -1, 0, 1), "needs other ranks, which the chain does not name"),
    (1, (JOIN, -1, 0, 1), "ranks join rows that are wider than the whole"),
    (1, (SUM, -1, 0, 1), "ranks add rows of another width"),
    (1, (SUM, -1, 0), "ends within a step"),
])  # fmt: skip
def test_wrong_steps_over_ranks_are_refused(
    ranks: int, steps: tuple[int, ...], error: str, tmp_path: Path
) -> None:
    program = np.array([VERSION, LAYOUT, 2, 0, 1, 1, 1, 4, *steps], np.int64)
    model = write_model(tmp_path / "0.onnx", "Chain", [program], rank=0, ranks=ranks)
    memory = RanksMemory(1, 30)
    try:
        alone = start(tmp_path, memory, 0, [np.ones((2, 5), np.float32)], model)
        assert error in alone.communicate(timeout=30)[1]
    finally:
        memory.close()


def cut_rows(weights: Sequence[Any], first: int, last: int) -> list[Any]:
    """Return some outputs of weights of blocks."""
    names = ("values", "scales", "zero_points", "minima")
    parts = [{name: value[first:last] for name in names if (value := getattr(one, name)) is not None}
             for one in weights]  # fmt: skip
    return [dataclasses.replace(one, **part) for one, part in zip(weights, parts, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("gated", [True, False])
def test_experts_over_ranks_give_the_bits_of_the_whole(gated: bool, tmp_path: Path) -> None:
    """Widths and outputs that are no multiples of blocks and tiles, cut within them."""
    random = np.random.default_rng(2)
    activation = "silu" if gated else "relu2"
    whole = random_experts(
        random, experts=4, hidden=72, width=90, biased=True, activation=activation, gated=gated
    )
    x = random.normal(size=(50, 72)).astype(np.float32)
    shares = random.random((50, 2)).astype(np.float32)
    chosen = random.integers(0, 4, (50, 2))
    parts = [((0, 90), (0, 72)), ((0, 37), (0, 30)), ((37, 90), (30, 72))]  # of the width, and of the outputs
    models = []
    for number, (width, outputs) in enumerate(parts):
        own = dataclasses.replace(
            whole,
            gate=cut_rows(whole.gate, *width),
            up=cut_rows(whole.up, *width),
            down=cut_rows(whole.down, *outputs),
            biases=[(*(bias[slice(*width)] for bias in all_[:-1]), all_[-1][slice(*outputs)])
                    for all_ in whole.biases or []],
        )  # fmt: skip
        attributes = experts_attributes(own)
        attributes |= {"inputs": 90, "outputs": outputs[1] - outputs[0], "number": 5}
        attributes |= {"rank": max(number - 1, 0), "ranks": 2 if number else 0}
        constants = [shares, *own.tiles(), *own.stacked_biases(), chosen]
        models.append(
            write_model(tmp_path / f"{number}.onnx", "QuantizedExperts", (), constants, **attributes)
        )
    memory = RanksMemory(2, 30)
    try:
        alone = start(tmp_path, memory, 2, [x], models[0])
        assert alone.communicate()[1] == ""
        children = [start(tmp_path, memory, rank, [x], models[rank + 1]) for rank in range(2)]
        assert [child.communicate()[1] for child in children] == ["", ""]
    finally:
        memory.close()
    found = np.concatenate([results(tmp_path, rank)[0] for rank in range(2)], axis=1)
    assert np.array_equal(found, results(tmp_path, 2)[0])


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
