"""Dynamic batching: every caller gets its own rows, whatever requests share the batch."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall import InferenceSession
from carryall.errors import EngineClosedError, ProviderRuntimeError, QueueFullError, RequestError, UsageError
from carryall.runtime.api.dynamic_batching import DynamicBatcher

SUMS = """
<ir_version: 10, opset_import: ["" : 21]>
sums (float[n, width] x, float[n] bias) => (float[n] total)
<int64[1] last = {-1}>
{
   row = ReduceSum <keepdims = 0> (x, last)
   total = Add(row, bias)
}
"""


class Watched:
    """A session that records its batches, can be blocked, and fails if a row begins with 13."""

    def __init__(self) -> None:
        self.session = InferenceSession(ir.from_onnx_text(SUMS), providers=["cpu"])
        self.batches: list[int] = []
        self.going = threading.Event()
        self.going.set()
        self.reached = threading.Event()

    def get_inputs(self) -> Any:
        return self.session.get_inputs()

    def get_outputs(self) -> Any:
        return self.session.get_outputs()

    def run(self, names: list[str], feeds: dict[str, Any]) -> Any:
        self.reached.set()
        assert self.going.wait(30)
        self.batches.append(len(feeds["bias"]))
        if (feeds["x"][:, 0] == 13).any():
            raise RuntimeError("thirteen")
        return self.session.run(names, feeds)


def feeds(first: float, rows: int = 1, width: int = 3) -> dict[str, Any]:
    x = np.full((rows, width), first, np.float32)
    return {"x": x, "bias": np.arange(rows, dtype=np.float32)}


def expected(given: dict[str, Any]) -> np.ndarray[Any, Any]:
    return given["x"].sum(1) + given["bias"]  # type: ignore[no-any-return]


def held_up(batcher: DynamicBatcher, session: Watched) -> Any:
    """Block the batcher in a run of one row, so that all later requests wait together."""
    session.going.clear()
    first = batcher.submit(feeds(0.0))
    assert session.reached.wait(30)
    return first


def test_requests_that_wait_share_a_batch() -> None:
    session = Watched()
    with DynamicBatcher(session, max_batch_size=8) as batcher:
        held_up(batcher, session)
        asked = [feeds(float(i), rows) for i, rows in enumerate([1, 2, 3, 1])]
        futures = [batcher.submit(one) for one in asked]
        session.going.set()
        for one, future in zip(asked, futures, strict=True):
            np.testing.assert_array_equal(future.result(30)["total"], expected(one))
    assert session.batches == [1, 7]


def test_batches_hold_at_most_so_many_rows_and_one_shape() -> None:
    session = Watched()
    with DynamicBatcher(session, max_batch_size=4) as batcher:
        held_up(batcher, session)
        asked = [feeds(1, 3), feeds(2, 1, width=5), feeds(3, 1), feeds(4, 2), feeds(5, 1, width=5)]
        futures = [batcher.submit(one) for one in asked]
        session.going.set()
        for one, future in zip(asked, futures, strict=True):
            np.testing.assert_array_equal(future.result(30)["total"], expected(one))
    assert session.batches == [1, 4, 2, 2]


def test_only_the_request_at_fault_fails() -> None:
    session = Watched()
    with DynamicBatcher(session) as batcher:
        held_up(batcher, session)
        good, bad = batcher.submit(feeds(2.0)), batcher.submit(feeds(13.0))
        session.going.set()
        np.testing.assert_array_equal(good.result(30)["total"], [6.0])
        with pytest.raises(ProviderRuntimeError, match="thirteen"):
            bad.result(30)
        np.testing.assert_array_equal(batcher.run(feeds(1.0))["total"], [3.0])


def test_a_cancelled_request_is_not_run() -> None:
    session = Watched()
    with DynamicBatcher(session) as batcher:
        held_up(batcher, session)
        kept, dropped = batcher.submit(feeds(1.0)), batcher.submit(feeds(2.0))
        assert dropped.cancel()
        session.going.set()
        kept.result(30)
        with pytest.raises(CancelledError):
            dropped.result()
    assert session.batches == [1, 1]


def test_closing_finishes_what_waits_and_takes_nothing_new() -> None:
    session = Watched()
    batcher = DynamicBatcher(session)
    first = held_up(batcher, session)
    second = batcher.submit(feeds(2.0))
    session.going.set()
    batcher.close()
    batcher.close()
    assert first.done()
    assert second.done()
    with pytest.raises(EngineClosedError):
        batcher.submit(feeds(1.0))


def test_a_full_queue_refuses() -> None:
    session = Watched()
    with DynamicBatcher(session, max_queue=1) as batcher:
        held_up(batcher, session)
        waiting = batcher.submit(feeds(1.0))
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            batcher.submit(feeds(2.0))
        session.going.set()
        np.testing.assert_array_equal(waiting.result(30)["total"], [3.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.ones((1, 3), np.float32)}, "the inputs are x, bias"),
        ({"x": np.ones((2, 3), np.float32), "bias": np.ones(1, np.float32)}, "same number of rows"),
        ({"x": np.ones((0, 3), np.float32), "bias": np.ones(0, np.float32)}, "at least one"),
        (feeds(1.0, rows=9), "the request has 9 rows, the maximum of a batch is 8"),
    ],
)
def test_requests_that_are_refused(wrong: dict[str, Any], message: str) -> None:
    with DynamicBatcher(Watched(), max_batch_size=8) as batcher, pytest.raises(RequestError, match=message):
        batcher.submit(wrong)


def test_models_without_a_free_batch_axis_are_refused() -> None:
    fixed = InferenceSession(
        ir.from_onnx_text(SUMS.replace("float[n] total", "float[1] total")), providers=["cpu"]
    )
    with pytest.raises(UsageError, match=r"'total' has shape \[1\]"):
        DynamicBatcher(fixed)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=12))
def test_each_caller_gets_its_own_rows(asked: list[tuple[int, int]]) -> None:
    async def main(batcher: DynamicBatcher) -> None:
        given_feeds = [feeds(float(i), rows, width) for i, (rows, width) in enumerate(asked)]
        results = await asyncio.gather(*(batcher.run_awaited(one) for one in given_feeds))
        for one, result in zip(given_feeds, results, strict=True):
            np.testing.assert_array_equal(result["total"], expected(one))

    with DynamicBatcher(SESSION, max_batch_size=5, max_delay=0.0005) as batcher:
        asyncio.run(main(batcher))


SESSION = InferenceSession(ir.from_onnx_text(SUMS), providers=["cpu"])
