"""InferenceSession's additions to onnxruntime: shared tensors, asyncio, placement."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from carryall import InferenceSession
from carryall.errors import ProviderRuntimeError, UsageError

SCALE = """
<ir_version: 10, opset_import: ["" : 21]>
scale (float[n, 3] x) => (float[n, 3] y, float[n] total)
<float[1] factor = {2.0}, int64[1] last = {-1}>
{
   [double] y = Mul(x, factor)
   [sum] total = ReduceSum <keepdims = 0> (y, last)
}
"""
ENDLESS = """
<ir_version: 10, opset_import: ["" : 21]>
endless (float[1] x) => (float[1] y)
<int64 trips = {9000000000000}, bool yes = {1}>
{
   y = Loop (trips, yes, x) <body = step (int64 i, bool going, float[1] before) => (bool go, float[1] after) {
      go = Identity(going)
      after = Sin(before)
   }>
}
"""


class Foreign:
    """A foreign tensor, which has the DLPack protocol only."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def session(text: str = SCALE) -> InferenceSession:
    return InferenceSession(ir.from_onnx_text(text), providers=["cpu"])


def rows(count: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def test_inputs_are_read_where_they_lie_at_each_run() -> None:
    x = rows()
    bound = session().bind({"x": x})
    np.testing.assert_array_equal(bound.run()["y"].numpy(), 2 * rows())
    x += 1
    np.testing.assert_array_equal(bound.run()["y"].numpy(), 2 * (rows() + 1))


def test_outputs_go_where_the_caller_says() -> None:
    x, y = rows(), np.zeros((4, 3), np.float32)
    results = session().run_tensors({"x": Foreign(x)}, {"y": y})
    np.testing.assert_array_equal(y, 2 * x)
    assert results["y"].data_ptr() == y.ctypes.data
    np.testing.assert_array_equal(results["total"].numpy(), 2 * x.sum(1))


def test_allocated_outputs_are_not_shared_and_outlive_the_session() -> None:
    x = rows()
    opened = session()
    bound = opened.bind({"x": x})
    first = bound.run()["y"]
    x += 5
    second = bound.run()["y"]
    assert first.data_ptr() != second.data_ptr()
    array = np.from_dlpack(first)
    assert array.ctypes.data == first.data_ptr()
    del opened, bound, first, second
    gc.collect()
    np.testing.assert_array_equal(array, 2 * rows())


def test_torch_tensors_are_shared() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.ones(2, 3), torch.empty(2, 3)
    results = session().run_tensors({"x": x}, {"y": y})
    assert torch.equal(y, 2 * x)
    assert torch.from_dlpack(results["total"]).data_ptr() == results["total"].data_ptr()


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"z": rows()}, {}, "no input 'z'; it has: x"),
        ({"x": rows()}, {"z": rows()}, "no output 'z'; it has: y, total"),
        ({"x": rows().T}, {}, "'x' is not C-contiguous"),
        ({"x": Foreign(rows().T)}, {}, "'x' cannot be shared"),
        ({"x": [1.0]}, {}, "'x' must be a NumPy array.*not list"),
    ],
)
def test_invalid_bindings_are_refused(inputs: dict[str, Any], outputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session().bind(inputs, outputs)


def test_a_read_only_array_is_an_input_but_no_output() -> None:
    x = rows()
    x.flags.writeable = False
    np.testing.assert_array_equal(session().run_tensors({"x": x})["y"].numpy(), 2 * x)
    with pytest.raises(UsageError, match="read-only"):
        session().bind({"x": rows()}, {"y": x})


def test_a_run_that_fails_says_so_and_the_session_lives_on() -> None:
    opened = session()
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    with pytest.raises(ProviderRuntimeError, match=r"shape \{3,3\}"):
        opened.run_tensors({"x": rows(4)}, {"y": rows(3)}, options)
    with pytest.raises(ProviderRuntimeError, match="the run failed"):
        opened.bind({}).run(options)
    np.testing.assert_array_equal(opened.run_tensors({"x": rows()})["y"].numpy(), 2 * rows())


def test_threads_share_a_session() -> None:
    opened = session()
    wrong = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((5, 3)).astype(np.float32)
        bound = opened.bind({"x": x})
        for _ in range(50):
            if not np.array_equal(bound.run()["y"].numpy(), 2 * x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_runs_may_be_awaited() -> None:
    opened = session()

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*(opened.run_awaited(["y"], {"x": rows(n)}) for n in (1, 2, 3)))

    for n, (y,) in enumerate(asyncio.run(main()), start=1):
        np.testing.assert_array_equal(y, 2 * rows(n))


def test_cancelling_ends_the_run() -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    opened = InferenceSession(ir.from_onnx_text(ENDLESS), options, ["cpu"])

    async def main() -> None:
        await asyncio.wait_for(opened.run_awaited(None, {"x": np.ones(1, np.float32)}), timeout=0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(main())  # this would never return if the thread still ran


@pytest.mark.parametrize("kind", ["model", "proto", "bytes", "path"])
def test_placement_counts_nodes_and_bytes(kind: str, tmp_path: Path) -> None:
    model = ir.from_onnx_text(SCALE)
    ir.save(model, tmp_path / "m.onnx")
    proto = ir.to_proto(model)
    sources: dict[str, Any] = {
        "model": model,
        "proto": proto,
        "bytes": proto.SerializeToString(),
        "path": tmp_path / "m.onnx",
    }
    placed = InferenceSession(sources[kind], providers=["cpu"]).placement()
    (share,) = placed.shares
    assert (share.provider, share.nodes, share.weight_bytes) == ("CPUExecutionProvider", 2, 4 + 8)
    assert share.operators == {"Mul": 1, "ReduceSum": 1}
    assert placed.unplaced_bytes == 0
    assert not placed.reasons
    assert str(placed) == "CPUExecutionProvider: 2 nodes, 12 bytes of weights (1 Mul, 1 ReduceSum)"
