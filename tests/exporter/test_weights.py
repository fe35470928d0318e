from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file
from tiny_models import write_sharded, write_tiny

from carryall.errors import CheckpointError
from carryall.exporter.weights import Checkpoint


def checkpoint_of(folder: Path, **tensors: npt.NDArray[Any]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_those_of_the_file_in_float32(tmp_path: Path, dtype: npt.DTypeLike) -> None:
    values = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    tensor = checkpoint_of(tmp_path, w=values).tensor("w", (7, 5))
    assert (tensor.name, tensor.dtype, tensor.shape) == ("w", ir.DataType.FLOAT, ir.Shape([7, 5]))
    np.testing.assert_array_equal(tensor.numpy(), values.astype(np.float32), strict=True)


@pytest.mark.parametrize("shape", [(300, 129), (1, 500), (128, 128), (5, 1)])
def test_a_transposed_view_comes_out_in_row_major_order(tmp_path: Path, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    tensor = checkpoint_of(tmp_path, w=values).tensor("w", shape, view=np.transpose, new_name="v")
    assert (tensor.name, tensor.shape) == ("v", ir.Shape(shape[::-1]))
    assert tensor.numpy().flags.c_contiguous
    np.testing.assert_array_equal(tensor.numpy(), values.astype(np.float32).T)


def test_a_view_may_slice_and_compute(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, w=np.arange(12, dtype=np.float16).reshape(3, 4))
    tensor = checkpoint.tensor("w", (3, 4), view=lambda array: array[:, 1:3].astype(np.float32) + 1)
    np.testing.assert_array_equal(tensor.numpy(), [[2, 3], [6, 7], [10, 11]])


def test_a_tensor_is_read_when_it_is_asked_for_and_not_kept(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, w=np.zeros(4, np.float32))
    tensor = checkpoint.tensor("w", (4,))
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    assert tensor.numpy()[3] == 7
    assert tensor.numpy() is not tensor.numpy()


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    whole, sharded = (
        Checkpoint(write_tiny("llama", tmp_path / "a")),
        Checkpoint(write_sharded("llama", tmp_path / "b")),
    )
    assert whole.unused() == sharded.unused()
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(
        whole.tensor(name, (32, 48)).numpy(), sharded.tensor(name, (32, 48)).numpy()
    )


def test_unused_lists_the_tensors_that_were_not_requested(tmp_path: Path) -> None:
    one = np.zeros(1, np.float32)
    checkpoint = checkpoint_of(tmp_path, a=one, b=one, c=one)
    checkpoint.tensor("a", (1,))
    checkpoint.ignore("c")
    assert "b" in checkpoint
    assert checkpoint.unused() == ["b"]


VALID = save({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "v": np.ones(2, np.float16)})


@given(length=st.integers(0, len(VALID) - 1))
def test_every_truncation_is_detected(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "model.safetensors").write_bytes(VALID[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ENTRIES = st.fixed_dictionaries({}, optional={"dtype": JSON, "shape": JSON, "data_offsets": JSON})


@given(
    header=JSON | st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3),
    data=st.binary(max_size=16),
)
def test_a_damaged_header_is_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    try:
        checkpoint = Checkpoint(folder)
    except CheckpointError:
        return
    for name in checkpoint.unused():
        with pytest.raises(CheckpointError):
            checkpoint.tensor(name, (2, 3))
