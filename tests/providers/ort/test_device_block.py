from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.providers.ort import ort
from carryall.providers.ort.device_block import DeviceBlock, Shapes, shapes_of
from carryall.providers.ort.device_memory import Device
from carryall.providers.ort.slot_memory import Array

MODEL = """g (int64[2, 1] ids, int32 total, bfloat16[3] states) =>
    (int64[2, 1] ids_out, int32 total_out, bfloat16[3] states_out)
    { ids_out = Identity(ids) total_out = Identity(total) states_out = Identity(states) }"""


def bytes_of(size: int) -> Any:
    return Device(name="cpu").allocate([size], np.dtype(np.uint8))


def test_a_run_reads_the_last_upload_and_its_results_come_by_one_copy() -> None:
    session = ort.open_session(ir.to_proto(graph(MODEL)).SerializeToString(), ort.CPU)
    shapes: Shapes = {
        "ids": ((2, 1), np.dtype(np.int64)),
        "total": ((), np.dtype(np.int32)),
        "states": ((3,), np.dtype(ml_dtypes.bfloat16)),
    }
    inputs = DeviceBlock(shapes, bytes_of)
    results = DeviceBlock({f"{name}_out": described for name, described in shapes.items()}, bytes_of)
    binding = session.io_binding()
    inputs.bind_inputs(binding, "cpu", 0)
    results.bind_outputs(binding, "cpu", 0)
    inputs.arrays["states"][:] = [1, 2, 3]
    for change in range(2):
        inputs.arrays["ids"][:] = [[7], [9 + change]]
        inputs.arrays["total"][...] = 3 + change
        inputs.upload()
        inputs.arrays["ids"][0] += 1  # not part of the run
        session.run_with_iobinding(binding)
        results.download()
        np.testing.assert_array_equal(results.arrays["ids_out"], [[7], [9 + change]])
        assert results.arrays["total_out"] == 3 + change
        np.testing.assert_array_equal(results.arrays["states_out"], inputs.arrays["states"])


@pytest.mark.parametrize("count", [1, 33])
def test_each_array_begins_where_a_value_of_its_own_could(count: int) -> None:
    arrays: dict[str, Array] = {"a": np.zeros(count, np.int64), "b": np.zeros(1, np.int32)}
    block = DeviceBlock(shapes_of(arrays), bytes_of)
    assert block.offsets["a"] == 0
    assert block.offsets["b"] % 256 == 0
    assert block.offsets["b"] >= arrays["a"].nbytes
