from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.graph_opt.graph import lazy


def counting(array: npt.NDArray[np.float32]) -> tuple[ir.LazyTensor, list[int]]:
    """Return a lazy tensor and a list of its evaluations."""
    calls: list[int] = []

    def compute() -> npt.NDArray[np.float32]:
        calls.append(1)
        return array

    return lazy.lazy(compute, ir.DataType.FLOAT, array.shape), calls


def int4(shape: Sequence[int]) -> ir.TensorProtocol:
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(ml_dtypes.int4)
    return ir.tensor(values, dtype=ir.DataType.INT4)


def test_composition_does_not_evaluate() -> None:
    source, calls = counting(np.ones((2, 4), np.float32))
    result = lazy.concat_last([lazy.transpose(source), lazy.reshape(source, (4, 2))])
    assert lazy.shape_of(result) == (4, 4)
    assert calls == []
    np.testing.assert_array_equal(result.numpy(), np.ones((4, 4)))
    assert calls == [1, 1]


@given(st.integers(1, 5), st.integers(1, 7))
def test_nibbles_survive_packing(rows: int, columns: int) -> None:
    values = np.random.default_rng(rows).integers(0, 16, (rows, columns)).astype(np.uint8)
    packed = lazy.pack_nibbles(values)
    assert packed.size == (rows * columns + 1) // 2
    np.testing.assert_array_equal(lazy.unpack_nibbles(packed, values.shape), values)


@pytest.mark.parametrize("where", ["memory", "file", "lazy"])
def test_packed_bytes_are_those_onnx_writes(where: str, tmp_path: Path) -> None:
    tensor: ir.TensorProtocol = int4((3, 4))
    expected = tensor.tobytes()
    if where == "file":
        tensor.name = "w"
        (tensor,) = ir.external_data.convert_tensors_to_external([tensor], tmp_path, "w.data")
    elif where == "lazy":
        content = np.frombuffer(expected, np.uint8)
        tensor = lazy.lazy(lambda: content, ir.DataType.INT4, (3, 4))
    assert lazy.packed_bytes(tensor).tobytes() == expected


def test_4_bit_matrices_are_concatenated() -> None:
    left, right = int4((3, 4)), int4((3, 2))
    expected = np.concatenate([left.numpy(), right.numpy()], axis=1)
    np.testing.assert_array_equal(lazy.concat_last([left, right]).numpy(), expected)


def test_shared_results_are_computed_once_and_released() -> None:
    calls: list[int] = []

    def compute() -> tuple[npt.NDArray[np.float32], ...]:
        calls.append(1)
        return np.zeros(2, np.float32), np.ones(3, np.float32)

    shared = lazy.SharedComputation(compute)
    assert shared.part(0).size == 2
    assert shared.part(1).size == 3
    assert len(calls) == 1
    shared.part(1)  # all parts were read, so nothing was kept
    assert len(calls) == 2


def test_a_second_thread_waits_instead_of_computing_again() -> None:
    calls: list[int] = []
    computing, proceed = threading.Event(), threading.Event()

    def compute() -> tuple[npt.NDArray[np.float32], ...]:
        calls.append(1)
        computing.set()
        assert proceed.wait(10)
        return np.zeros(2, np.float32), np.ones(3, np.float32)

    shared = lazy.SharedComputation(compute)
    threads = [threading.Thread(target=shared.part, args=(index,)) for index in range(2)]
    threads[0].start()
    assert computing.wait(10)
    threads[1].start()
    proceed.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1


def test_kept_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_recent", lazy._RecentResults(capacity=1000))
    calls: list[int] = []

    def compute() -> tuple[npt.NDArray[np.float32], ...]:
        calls.append(1)
        return np.zeros(100, np.float32), np.zeros(100, np.float32)

    first, second = lazy.SharedComputation(compute), lazy.SharedComputation(compute)
    first.part(0)
    second.part(0)  # 1600 bytes would be kept, so the first is dropped
    second.part(1)
    assert len(calls) == 2
    first.part(1)
    assert len(calls) == 3


def test_weights_in_files_are_mapped_before_threads_share_them(tmp_path: Path) -> None:
    content = np.arange(4096, dtype=np.float32)
    graph = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[4096] x) => (float[4096] y) { y = Add(x, w) }',
        initializers=[ir.tensor(content, name="w")],
    )
    ir.save(graph, tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "m.onnx")
    lazy.map_weights(model)
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.raw is not None  # already mapped, so no thread maps it
    np.testing.assert_array_equal(tensor.numpy(), content)
    (tmp_path / "m.data").unlink()
    lazy.map_weights(ir.load(tmp_path / "m.onnx"))  # the reader reports the missing file


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not rename over a mapped file")
def test_mapped_weights_keep_their_file_when_it_is_replaced(tmp_path: Path) -> None:
    """Renaming another file over it, as every writer does; a file truncated in place ends a process."""
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[4096] x) => (float[4096] y) { y = Add(x, w) }'
    for name, value in (("m", 1.0), ("new", 2.0)):
        model = ir.from_onnx_text(text, initializers=[ir.tensor(np.full(4096, value, np.float32), name="w")])
        ir.save(model, tmp_path / f"{name}.onnx", external_data=f"{name}.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "m.onnx")
    lazy.map_weights(model)
    (tmp_path / "new.data").replace(tmp_path / "m.data")
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), np.ones(4096, np.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files in /proc")
def test_the_weights_of_a_file_keep_one_file_open(tmp_path: Path) -> None:
    """A model may have more weights than a process may open files."""
    arrays = {f"w{number}": np.full((2, 3), number, np.float16) for number in range(50)}
    text = '<ir_version: 10, opset_import: ["" : 21]> one (float[n] x) => (float[n] y) { y = Identity(x) }'
    model = ir.from_onnx_text(text)
    for name, array in arrays.items():
        model.graph.initializers[name] = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "m.onnx")
    before = len(os.listdir("/proc/self/fd"))
    lazy.map_weights(model)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for name, array in arrays.items():
        tensor = model.graph.initializers[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.tobytes() == array.tobytes()
