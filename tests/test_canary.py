"""No text of a request reaches a log through HTTP, gRPC or batch jobs, whatever goes wrong with it.

All loggers of the process are read at level debug, with the tracebacks of their records, and stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import batch_kit
import grpc
import pytest
from click.testing import CliRunner
from grpc_serving import serving
from http_serving import http_serving
from null_llm import null_llm

from carryall import logs
from carryall.cli import carryall
from carryall.proto import generation_pb2 as pb
from carryall.proto import sampling_pb2
from carryall.runtime.api.requests import RequestFactory
from carryall.runtime.batch.online.routes import BatchService
from carryall.runtime.batch.workers.endpoints import Preparer

CANARY = "xyzzycanary"
CLIENTS = ("httpx", "httpcore", "openai")  # in the same process, but not ours
MESSAGES = [{"role": "system", "content": CANARY}, {"role": "user", "content": f"Say {CANARY}"}]
TOOL = {"type": "function", "function": {"name": CANARY, "parameters": {"type": "object"}}}
BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "stream": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": CANARY * 10_000}),
    ("/v1/completions", {"prompt": {CANARY: 1}}),
    ("/v1/completions", {"prompt": "x", "stop": [CANARY], CANARY: 1}),
    ("/v1/completions", {"prompt": "x", "structured_output": {"regex": f"({CANARY}("}}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": 5}]}),
    ("/v1/responses", {"input": CANARY}),
    ("/v1/embeddings", {"input": [CANARY]}),
    ("/v1/rerank", {"query": CANARY, "documents": [CANARY]}),
    ("/tokenize", {"prompt": CANARY}),
]


class Kept(logging.Handler):
    """Formats all records but those of clients."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(CLIENTS):
            self.lines.append(logs.JsonFormatter().format(record))


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail if the canary was logged, or printed to stderr."""
    root, kept = logging.getLogger(), Kept()
    level = root.level
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    yield
    root.removeHandler(kept)
    root.setLevel(level)
    assert [line for line in kept.lines if CANARY in line] == []
    assert CANARY not in capfd.readouterr().err


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def failing(*_: Any, **__: Any) -> Any:
    """Quote the request, as libraries do."""
    raise ValueError(f"cannot tokenize {CANARY}")


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True])
def test_http(broken: bool, tmp_path: Path, logged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            if broken:
                monkeypatch.setattr(RequestFactory, "group", failing)
            for path, body in BODIES:
                await served.post(path, **{"model": "toy", "max_tokens": 2, **body})
            await served.post("/v1/completions", model=CANARY, prompt="x")
            await served.client.post("/v1/completions", content=f'{{"prompt": "{CANARY}'.encode())
            await served.client.post("/v1/completions", content=CANARY.encode() + b"\xff")

    run(scenario())


@pytest.mark.parametrize("broken", [False, True])
def test_grpc(broken: bool, logged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [pb.ChatMessage(role="user", content=CANARY)]
    options = sampling_pb2.SamplingOptions(max_tokens=2)
    regex = sampling_pb2.StructuredOutput(regex=f"({CANARY}(")
    requests = [
        pb.GenerateRequest(text=CANARY, sampling=options),
        pb.GenerateRequest(text=CANARY * 10_000, sampling=options),
        pb.ChatRequest(messages=chat, sampling=options),
        pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingOptions(stop=[CANARY], max_tokens=2)),
        pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingOptions(structured_output=regex)),
        pb.GenerateRequest(text="x", model=CANARY),
    ]

    async def scenario() -> None:
        async with null_llm() as llm, serving(llm) as served:
            if broken:
                monkeypatch.setattr(RequestFactory, "group", failing)
            refused = 0
            for request in requests:
                try:
                    method = "Chat" if isinstance(request, pb.ChatRequest) else "Generate"
                    async for _ in getattr(served.stub, method)(request):
                        pass
                except grpc.aio.AioRpcError:
                    refused += 1
            assert refused == (6 if broken else 3)

    run(scenario())


LINES: list[Any] = [
    {"prompt": CANARY, "max_tokens": 2},
    {"messages": MESSAGES, "max_tokens": 2},
    {"prompt": {CANARY: 1}},
    {"prompt": "x", CANARY: 1},
    {"prompt": CANARY * 10_000},
    f'{{"prompt": "{CANARY}',
    CANARY.encode() + b"\xff",
]


@pytest.mark.parametrize("broken", [False, True])
def test_batch_jobs(broken: bool, tmp_path: Path, logged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        monkeypatch.setattr(Preparer, "prepare", failing)
    source = batch_kit.write_lines(tmp_path / "in.jsonl", LINES)
    where = [str(source), "-o", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(carryall, ["batch", "run", *where, "--model", "demo", "--provider", "null"])
    assert CANARY not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True])
def test_batches_of_a_service(
    broken: bool, tmp_path: Path, logged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(number: int, body: Any) -> bytes:
        shape = {"custom_id": f"{CANARY}{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(shape).encode() + b"\n"

    async def scenario() -> None:
        parts: Any = [lambda models, settings: BatchService(tmp_path, settings)]
        async with null_llm() as llm, http_serving(llm, parts=parts) as served:
            if broken:
                monkeypatch.setattr(RequestFactory, "group", failing)
            client = served.openai()
            bodies = [{"model": "toy", "max_tokens": 2, **one} for one in LINES if isinstance(one, dict)]
            data = b"".join(line(*each) for each in enumerate(bodies)) + CANARY.encode()
            file = await client.files.create(file=(f"{CANARY}.jsonl", data), purpose="batch")
            made = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            while (batch := await client.batches.retrieve(made.id)).status not in ("completed", "failed"):
                await asyncio.sleep(0.02)
            assert batch.status == ("failed" if broken else "completed")

    run(scenario())
