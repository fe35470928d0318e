"""ONNX files from strangers: bytes and structure changed, and the file is a graph or a GraphError."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import onnx
import pytest
from fuzzing import damaged, fuzz, seeds
from hypothesis import strategies as st

from carryall.errors import CarryallError
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

SEEDS = seeds("graphs")
NAMES = ("", "x", "y", "a", "w", "nope", "x" * 300, "é")
OPERATORS = ("Add", "Reshape", "Cast", "Loop", "If", "Concat", "Slice", "MatMul", "Nope", "", "Constant")


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A seed whose nodes, names, types, shapes, weights or opset are others."""
    proto = onnx.load_model_from_string(draw(st.sampled_from(SEEDS)).read_bytes())
    graph = proto.graph
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.integers(0, 8))
        node = graph.node[draw(st.integers(0, len(graph.node) - 1))] if graph.node else None
        value = draw(st.sampled_from([*graph.input, *graph.output])) if graph.input or graph.output else None
        weight = draw(st.sampled_from(list(graph.initializer))) if graph.initializer else None
        if way == 0 and node is not None:
            node.op_type = draw(st.sampled_from(OPERATORS))
        elif way == 1 and node is not None and node.input:
            node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(NAMES))
        elif way == 2 and node is not None and node.output:
            node.output[draw(st.integers(0, len(node.output) - 1))] = draw(st.sampled_from(NAMES))
        elif way == 3 and node is not None:
            graph.node.append(copy.deepcopy(node))
        elif way == 4 and value is not None:
            value.type.tensor_type.elem_type = draw(st.integers(0, 30))
        elif way == 5 and value is not None:
            dims = value.type.tensor_type.shape.dim
            dims.add().dim_value = draw(st.sampled_from([-1, 0, 1, 2**31, 2**62]))
        elif way == 6 and weight is not None:
            weight.dims.append(draw(st.sampled_from([-1, 0, 1, 3, 2**31, 2**62])))
        elif way == 7 and weight is not None:
            weight.data_type = draw(st.integers(0, 30))
        else:
            proto.opset_import[0].version = draw(st.sampled_from([-1, 0, 1, 6, 7, 13, 28, 99, 2**40]))
    return proto.SerializeToString()


def check(content: bytes, path: Path) -> None:
    """Read and optimize a file; only ever an error of ours, of one line's worth of words."""
    path.write_bytes(content)
    with contextlib.suppress(CarryallError):
        run(load_model(path), portable_passes())


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_kept_files(seed: Path, tmp_path: Path) -> None:
    check(seed.read_bytes(), tmp_path / "model.onnx")


FILES = changed() | st.sampled_from(SEEDS).flatmap(lambda path: damaged(path.read_bytes()))


@pytest.mark.parametrize("examples", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_any_file_is_a_graph_or_an_error(examples: int | None, tmp_path: Path) -> None:
    fuzz(FILES, lambda content: check(content, tmp_path / "model.onnx"), examples)
