from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.providers.ort import ort
from carryall.providers.ort.device_memory import Device
from carryall.providers.ort.packed_inputs import PackedInputs
from carryall.providers.ort.slot_memory import Array

MODEL = """g (int64[2, 1] ids, int32 total, bfloat16[3] states) =>
    (int64[2, 1] ids_out, int32 total_out, bfloat16[3] states_out)
    { ids_out = Identity(ids) total_out = Identity(total) states_out = Identity(states) }"""


def test_a_run_reads_what_the_arrays_held_at_the_upload() -> None:
    session = ort.open_session(ir.to_proto(graph(MODEL)).SerializeToString(), ort.CPU)
    arrays: dict[str, Array] = {
        "ids": np.array([[7], [9]]),
        "total": np.array(3, np.int32),
        "states": np.array([1, 2, 3], ml_dtypes.bfloat16),
    }
    packed = PackedInputs(arrays, lambda size: Device(name="cpu").allocate([size], np.dtype(np.uint8)))
    binding = session.io_binding()
    packed.bind(binding, "cpu", 0)
    for name in arrays:
        binding.bind_output(f"{name}_out", "cpu")
    for change in range(2):
        arrays["ids"][1] += change
        arrays["total"][...] += change
        packed.upload()
        arrays["ids"][0] += 1  # not part of the run
        session.run_with_iobinding(binding)
        ids, total, states = binding.get_outputs()
        np.testing.assert_array_equal(ids.numpy(), [[7 + change], [9 + change]])
        assert total.numpy() == 3 + change
        assert states.element_type() == ir.DataType.BFLOAT16


@pytest.mark.parametrize("count", [1, 33])
def test_each_input_begins_where_a_value_of_its_own_could(count: int) -> None:
    arrays: dict[str, Array] = {"a": np.zeros(count, np.int64), "b": np.zeros(1, np.int32)}
    packed = PackedInputs(arrays, lambda size: Device(name="cpu").allocate([size], np.dtype(np.uint8)))
    assert packed._offsets["a"] == 0
    assert packed._offsets["b"] % 256 == 0
    assert packed._offsets["b"] >= arrays["a"].nbytes
