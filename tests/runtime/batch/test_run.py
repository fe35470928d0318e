"""Batch runs through the real engine: one result a line, bounded memory, faults contained."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from grpc_serving import INFO
from null_llm import null_llm

from carryall.errors import EngineClosedError, ProviderRuntimeError
from carryall.runtime.batch.lines import LineReader
from carryall.runtime.batch.run import BatchRun, BatchSummary
from carryall.runtime.service.handler import LLMHandler
from carryall.runtime.service.served_model import ServedModel

Record = dict[str, Any]
GREEDY = {"temperature": 0, "ignore_eos": True}


def run(
    records: Iterable[Record | bytes], *, finished: Iterable[str] = (), in_flight: int = 4, **engine: Any
) -> tuple[list[Record], BatchSummary]:
    data = b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records)
    results: list[Record] = []

    async def scenario() -> BatchSummary:
        async with null_llm(**engine) as llm:
            handler = LLMHandler()
            handler.ready(ServedModel(llm, INFO))
            batch = BatchRun(handler, results.append, set(finished))
            return await batch.run(iter(LineReader(io.BytesIO(data), GREEDY)), in_flight)

    return results, asyncio.run(scenario())


def text_of(result: Record) -> str:
    return str(result["response"]["body"]["choices"][0]["text"])


def test_every_line_gets_one_result() -> None:
    records: list[Record | bytes] = [
        {
            "custom_id": "ü",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "naïve 漢", "max_tokens": 3},
        },
        {"prompt": "b", "max_tokens": 5},
        b"{broken",
        {"custom_id": "ü", "prompt": "again"},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": [1] * 5000},
    ]
    results, summary = run(records)
    assert sorted(result["id"] for result in results) == [f"batch_req_{n}" for n in range(1, 7)]
    results.sort(key=lambda result: str(result["id"]))
    assert [r["custom_id"] for r in results] == ["ü", "line-2", None, "ü", None, "line-6"]
    assert [r["error"] and r["error"]["code"] for r in results] == [
        None, None, "invalid_line", "duplicate_custom_id", "invalid_request", "invalid_request",
    ]  # fmt: skip
    assert [r["error"]["line"] for r in results[2:]] == [3, 4, 5, 6]
    body = results[1]["response"]["body"]
    assert results[1]["response"]["status_code"] == 200
    assert (body["model"], body["usage"]["completion_tokens"]) == ("toy", 5)
    assert (summary.completed, summary.failed, summary.skipped) == (2, 4, 0)
    assert summary.errors == {"invalid_line": 1, "duplicate_custom_id": 1, "invalid_request": 2}
    assert summary.completion_tokens == 8


def test_results_do_not_depend_on_what_else_is_in_flight() -> None:
    records = [{"prompt": f"p{n}", "max_tokens": 2 + n % 7} for n in range(30)]
    together, _ = run(records, in_flight=8, max_slots=4)
    alone, _ = run(records, in_flight=1)
    assert [r["custom_id"] for r in alone] == [f"line-{n}" for n in range(1, 31)]
    assert {r["custom_id"]: text_of(r) for r in together} == {r["custom_id"]: text_of(r) for r in alone}


def test_results_come_as_they_finish() -> None:
    records = [{"prompt": "slow", "max_tokens": 200}, {"prompt": "quick", "max_tokens": 1}]
    results, _ = run(records, in_flight=2, step_seconds=0.002)
    assert [r["custom_id"] for r in results] == ["line-2", "line-1"]


def test_a_large_file_is_never_held() -> None:
    ahead: list[int] = []
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while read < 100:
            read += 1
            yield b'{"prompt": "x", "max_tokens": 1}\n'

    class Source(io.RawIOBase):
        lines = endless()

        def readline(self, size: int | None = -1) -> bytes:
            return next(self.lines, b"")

    async def scenario() -> BatchSummary:
        async with null_llm(max_slots=2, step_seconds=0.002) as llm:
            handler = LLMHandler()
            handler.ready(ServedModel(llm, INFO))
            batch = BatchRun(handler, lambda result: ahead.append(read - len(ahead)))
            return await batch.run(iter(LineReader(Source(), GREEDY)), in_flight=6)  # type: ignore[arg-type]

    assert asyncio.run(scenario()).completed == 100
    assert max(ahead) <= 6


def test_finished_lines_are_skipped() -> None:
    records = [{"prompt": "a"}, {"prompt": "b", "custom_id": "b"}, {"prompt": "c"}]
    results, summary = run(records, finished={"line-1", "b"})
    assert [r["custom_id"] for r in results] == ["line-3"]
    assert (summary.completed, summary.skipped) == (1, 2)


def test_chat_lines() -> None:
    results, _ = run([{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}])
    body = results[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_failing_model_fails_lines_and_not_the_run() -> None:
    def fail(rows: object) -> None:
        raise ProviderRuntimeError("the device is on fire")

    results, summary = run([{"prompt": "a"}, {"prompt": "b"}], before_forward=fail)
    assert [r["error"]["code"] for r in results] == ["server_error"] * 2
    assert "on fire" in results[0]["error"]["message"]
    assert summary.failed == 2


def test_a_closed_engine_ends_the_run_after_what_was_written() -> None:
    results: list[Record] = []

    async def scenario() -> None:
        async with null_llm() as llm:
            handler = LLMHandler()
            handler.ready(ServedModel(llm, INFO))

            def write(result: Record) -> None:
                results.append(result)
                llm.shutdown()

            data = b'{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "max_tokens": 1}\n'
            await BatchRun(handler, write).run(iter(LineReader(io.BytesIO(data), GREEDY)), 1)

    with pytest.raises(EngineClosedError):
        asyncio.run(scenario())
    assert len(results) == 1


def test_a_full_disk_ends_the_run() -> None:
    def write(result: Record) -> None:
        raise OSError("No space left on device")

    async def scenario() -> None:
        async with null_llm() as llm:
            handler = LLMHandler()
            handler.ready(ServedModel(llm, INFO))
            lines = iter(LineReader(io.BytesIO(b'{"prompt": "a"}\n' * 9), GREEDY))
            await BatchRun(handler, write).run(lines, 3)

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(scenario())
