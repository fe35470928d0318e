"""Sums and joined parts over ranks by NCCL, with its stand-in and the emulator's driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from cuda_emulator import build_nccl, operators

from carryall.errors import ProviderUnavailableError
from carryall.providers.base import RunnerConfig
from carryall.providers.cuda import nccl
from carryall.providers.runners.ranks_memory import RanksMemory
from carryall.providers.targets.cuda import CudaProvider

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform == "win32", reason="ranks need POSIX")]

RUN = """
import ctypes, sys
import numpy as np
import onnxruntime as ort
library, emulator, nccl, model, values, results = sys.argv[1:]
functions = ctypes.CDLL(library)
for name in ("carryall_cuda_load", "carryall_nccl_load"):
    getattr(functions, name).restype = ctypes.c_char_p
assert functions.carryall_cuda_load(emulator.encode(), 0, b"") is None
if nccl:
    assert functions.carryall_nccl_load(nccl.encode()) is None
try:
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    outputs = [session.run(None, {"x": x})[0] for x in np.load(values).values()]
except Exception as error:
    sys.exit(str(error))
np.savez(results, *outputs)
"""
Floats = npt.NDArray[np.float32]


def run(
    folder: Path,
    operator: str,
    values: Sequence[Sequence[Floats]],
    *,
    whole: int = 0,
    load: bool = True,
    **more: str,
) -> tuple[list[str], list[list[Floats]]]:
    """Run an operator in a process for each rank; return what they wrote to stderr, and their results."""
    emulator, library = operators()
    stand_in = str(build_nccl(folder)) if load else ""
    memory, children = RanksMemory(len(values), 30), []
    try:
        for rank, own in enumerate(values):
            np.savez(folder / f"values{rank}.npz", *own)
            attributes = {
                "rank": rank,
                "ranks": len(values),
                "number": 1,
                **({"whole": whole} if whole else {}),
            }
            x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
            node = ir.node(operator, [x], attributes, domain="carryall")
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            graph = ir.Graph([x], node.outputs, nodes=[node], name="g", opset_imports={"": 23, "carryall": 1})
            ir.save(ir.Model(graph, ir_version=10), folder / f"{rank}.onnx")
            files = [folder / f"{rank}.onnx", folder / f"values{rank}.npz", folder / f"results{rank}.npz"]
            command = [
                sys.executable,
                "-c",
                RUN,
                str(library),
                str(emulator.library),
                stand_in,
                *map(str, files),
            ]
            environment = {"PATH": os.defpath, **memory.variables, **more}
            children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        errors = [child.communicate(timeout=60)[1] for child in children]
    finally:
        memory.close()
    if any(errors):
        return errors, []
    stored = [np.load(folder / f"results{rank}.npz") for rank in range(len(values))]
    return errors, [[*found.values()] for found in stored]


@pytest.mark.parametrize("count", [2, 4])
def test_sums_are_those_of_all_ranks(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (2, 1, 2048), (0, 4), (1, 1, 7)]
    values = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(count)]
    errors, found = run(tmp_path, "AllReduce", values)
    assert errors == [""] * count
    for index in range(len(shapes)):
        expected = values[0][index].copy()
        for rank in range(1, count):
            expected += values[rank][index]
        for rank in range(count):
            np.testing.assert_array_equal(found[rank][index], expected)


def test_parts_of_different_widths_are_joined_in_every_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = [
        [rng.normal(size=(rows, width)).astype(np.float32) for rows in (2, 300, 0, 1)] for width in (3, 5, 1)
    ]
    errors, found = run(tmp_path, "AllGather", parts, whole=9)
    assert errors == [""] * 3
    for run_index in range(4):
        joined = np.concatenate([part[run_index] for part in parts], axis=1)
        for rank in range(3):
            np.testing.assert_array_equal(found[rank][run_index], joined)


def test_parts_that_are_shorter_than_the_whole_are_refused(tmp_path: Path) -> None:
    errors, _ = run(tmp_path, "AllGather", [[np.ones((2, 3), np.float32)]] * 2, whole=8)
    assert all("the parts of the ranks are shorter than the whole" in error for error in errors)


def test_a_failure_of_nccl_has_its_reason(tmp_path: Path) -> None:
    errors, _ = run(tmp_path, "AllReduce", [[np.ones(3, np.float32)] * 2] * 2, NCCL_STUB_FAIL="2")
    assert all("ncclAllReduce failed: unhandled cuda error (error 1)" in error for error in errors)


def test_a_graph_of_a_rank_needs_nccl(tmp_path: Path) -> None:
    errors, _ = run(tmp_path, "AllReduce", [[np.ones(3, np.float32)]], load=False)
    assert "NCCL is not loaded" in errors[0]


def test_without_nccl_the_remedy_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.libraries, "load", lambda file: None)
    with pytest.raises(ProviderUnavailableError, match=r"libnccl.so.2 .*pip install nvidia-nccl-cu"):
        nccl.load_nccl(operators()[1])


def test_each_rank_has_its_device_and_captures_nothing() -> None:
    config = RunnerConfig(options={"device": 1, "kv_memory": "paged"})
    options = [CudaProvider().rank_config(config, rank).options for rank in range(2)]
    assert [one["device"] for one in options] == [1, 2]
    assert all(one["cuda_graphs"] is False and one["top_logits"] == 0 for one in options)
