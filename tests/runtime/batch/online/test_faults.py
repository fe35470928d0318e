"""Batches of a service on a faulty disk: they wait while it is full, and fail after other errors.

The service goes on.
"""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from faults import CALLS, NUMBERS, Fault, faulty, killed_in
from http_serving import HttpServed, http_serving
from null_llm import null_llm

from carryall.runtime.batch.jobs import writer
from carryall.runtime.batch.online import batches
from carryall.runtime.batch.online.batches import BatchQueue
from carryall.runtime.batch.online.routes import BatchService

LINES = b"".join(
    json.dumps(
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "toy", "prompt": f"p{number}", "max_tokens": 4, "temperature": 0},
        }
    ).encode()
    + b"\n"
    for number in range(3)
)
ROWS = [(call, number) for call in CALLS for number in NUMBERS[call]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (writer, batches):
        monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.01)


async def answered(served: HttpServed) -> Any:
    """Run a batch; return its texts, or its status and errors if it failed."""
    client = served.openai()
    file = await client.files.create(file=("in.jsonl", LINES), purpose="batch")
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    while (batch := await client.batches.retrieve(made.id)).status not in ("completed", "failed"):
        await asyncio.sleep(0.01)
    if batch.status == "failed":
        return [error.code for error in batch.errors.data]
    lines = (await client.files.content(batch.output_file_id)).text.splitlines()
    return [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]


async def scenario(folder: Path, call: str, number: int, skip: int) -> None:
    async with null_llm() as llm:
        parts: Any = [lambda models, settings: BatchService(folder, settings)]
        async with http_serving(llm, parts=parts) as served:
            expected = await answered(served)
            statuses: list[int] = []
            count = 3 if number == errno.ENOSPC else 1
            with faulty(Fault(folder.resolve(), call, number, skip, count)):
                try:
                    found = await answered(served)
                except openai.APIStatusError as error:
                    statuses.append(error.status_code)
                    found = expected
                except openai.APIConnectionError:
                    if call not in ("open", "read"):  # a download that had begun
                        raise
                    found = expected
            assert [status for status in statuses if status < 500] == []
            assert found in (expected, ["server_error"])
            assert found == expected or number != errno.ENOSPC
            assert (await served.client.get("/health")).status_code == 200
            assert await answered(served) == expected


def attempt(folder: Path, call: str, number: int, skip: int) -> None:
    asyncio.run(asyncio.wait_for(scenario(folder, call, number, skip), 60))


@pytest.mark.parametrize(
    ("call", "number", "skip"),
    [
        ("write", errno.ENOSPC, 2),
        ("create", errno.ENOSPC, 5),  # the lock of the job
        pytest.param("rename", errno.EIO, 3, marks=pytest.mark.long),
        pytest.param("read", errno.EIO, 1, marks=pytest.mark.long),
    ],
)
def test_a_fault_of_a_call(call: str, number: int, skip: int, tmp_path: Path) -> None:
    attempt(tmp_path, call, number, skip)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "number"), ROWS)
def test_all_faults_of_calls(call: str, number: int, tmp_path: Path) -> None:
    for skip in range(12):
        attempt(tmp_path / str(skip), call, number, skip)


def test_results_that_cannot_be_read_are_an_error_of_the_server(tmp_path: Path) -> None:
    async def test() -> None:
        async with null_llm() as llm:
            parts: Any = [lambda models, settings: BatchService(tmp_path, settings)]
            async with http_serving(llm, parts=parts) as served:
                client = served.openai()
                file = await client.files.create(file=("in.jsonl", LINES), purpose="batch")
                for call in ("open", "read"):
                    fault = Fault(tmp_path.resolve(), call, errno.EIO)
                    with faulty(fault), pytest.raises(openai.InternalServerError):
                        await client.files.content(file.id)
                assert (await client.files.content(file.id)).content == LINES

    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_killed_thread_of_the_queue(tmp_path: Path) -> None:
    async def test() -> None:
        async with null_llm() as llm:
            parts: Any = [lambda models, settings: BatchService(tmp_path, settings)]
            async with http_serving(llm, parts=parts) as served:
                with killed_in("carryall-batches", BatchQueue, "_run"):
                    assert await answered(served) == ["server_error"]
                assert len(await answered(served)) == 3

    asyncio.run(asyncio.wait_for(test(), 60))
