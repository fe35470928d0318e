"""OpenAI's own client against the files and batches endpoints of a real server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from api_keys import key_file
from encoder_kit import write_encoder
from http_serving import HttpServed, http_serving
from null_llm import null_llm

import carryall
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.text_encoder import TextEncoder
from carryall.runtime.batch.online import served as served_module
from carryall.runtime.batch.online.routes import BatchService
from carryall.runtime.service.core.model_entry import ModelLoader
from carryall.runtime.service.core.repository import ModelRepository
from carryall.runtime.types.sampling_params import SamplingParams

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
URL = "/v1/completions"


def line(number: int, url: str = URL, **body: Any) -> dict[str, Any]:
    usual = {"model": "toy", "prompt": f"p{number}", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body or usual}


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, str) else json.dumps(each)).encode() + b"\n" for each in lines)


@asynccontextmanager
async def serving(folder: Path, llm: AsyncLLM, **config: Any) -> AsyncIterator[HttpServed]:
    """A server with the endpoints."""
    parts: Any = [lambda models, settings: BatchService(folder, settings)]
    async with http_serving(llm, parts=parts, **config) as served:
        yield served


async def until(client: Any, name: str, condition: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + 60
    while not condition(batch := await client.batches.retrieve(name)):
        assert time.monotonic() < end, batch
        await asyncio.sleep(0.02)
    return batch


async def ended(client: Any, name: str) -> Any:
    return await until(client, name, lambda batch: batch.status not in OPEN)


async def lines_of(client: Any, name: str) -> list[Any]:
    return [json.loads(line) for line in (await client.files.content(name)).text.splitlines()]


async def batch_of(client: Any, data: bytes, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    usual = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
    return await client.batches.create(**{**usual, **options})


def test_a_batch_is_answered_by_the_served_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            data = jsonl(*map(line, range(12)), "{torn", line(3), line(20, "/v1/chat/completions"))
            expiry = {"anchor": "created_at", "seconds": 7200}
            made = await batch_of(client, data, metadata={"a": "b"}, output_expires_after=expiry)
            assert (made.status, made.expires_at) == ("validating", made.created_at + 86400)
            batch = await ended(client, made.id)
            assert (batch.status, batch.metadata, batch.model) == ("completed", {"a": "b"}, "toy")
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (15, 12, 3)
            assert made.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
            results = await lines_of(client, batch.output_file_id)
            assert [each["custom_id"] for each in results] == [f"c{n}" for n in range(12)]
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            *_, expected = [output async for output in llm.generate("p5", params)]
            assert results[5]["response"]["body"]["choices"][0]["text"] == expected.outputs[0].text
            assert batch.usage.output_tokens == 48
            errors = await lines_of(client, batch.error_file_id)
            assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
                ("line-13", "invalid_line"),
                ("c3", "duplicate_custom_id"),
                ("c20", "invalid_request"),
            ]
            output = await client.files.retrieve(batch.output_file_id)
            size = len((await client.files.content(batch.output_file_id)).content)
            assert (output.purpose, output.bytes) == ("batch_output", size)
            assert output.expires_at == output.created_at + 7200

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
        ("/v1/embeddings", {"input": ["Hi", "Ho"]}),
    ],
)
def test_each_endpoint_answers_in_its_shape(tmp_path: Path, endpoint: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            made = await batch_of(client, jsonl(line(1, endpoint, model="toy", **body)), endpoint=endpoint)
            batch = await ended(client, made.id)
            if endpoint == "/v1/embeddings":  # this model has no vectors
                (error,) = await lines_of(client, batch.error_file_id)
                assert (error["error"]["code"], batch.output_file_id) == ("invalid_request", None)
                return
            (result,) = await lines_of(client, batch.output_file_id)
            found = result["response"]["body"]
            kind, name = (
                ("response", "output") if endpoint == "/v1/responses" else ("chat.completion", "completion")
            )
            assert (found["object"], found["usage"][f"{name}_tokens"]) == (kind, 3)

    asyncio.run(scenario())


@pytest.mark.long
def test_an_encoder_answers_batches_of_embeddings(tmp_path: Path) -> None:
    async def scenario() -> None:
        write_encoder(tmp_path / "m")
        models = ModelRepository(
            {"vectors": ModelLoader(lambda: TextEncoder(tmp_path / "m"), kind="encoder")}
        )
        parts: Any = [lambda models, settings: BatchService(tmp_path / "batches", settings)]
        async with http_serving(None, models, parts) as served:
            client = served.openai()
            url, inputs = "/v1/embeddings", [["the cat", "a dog"], ["the dog"]]
            bodies = [{"model": "vectors", "input": texts} for texts in inputs]
            data = jsonl(*(line(n, url, **body) for n, body in enumerate(bodies)))
            batch = await ended(client, (await batch_of(client, data, endpoint=url)).id)
            results = await lines_of(client, batch.output_file_id)
            for body, result in zip(bodies, results, strict=True):
                direct = await client.embeddings.create(**body, encoding_format="float")
                assert result["response"]["body"] == direct.to_dict()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_batch_goes_on_after_the_server_was_stopped(tmp_path: Path) -> None:
    lines = [line(n, model="toy", prompt=f"p{n}", max_tokens=6, temperature=1) for n in range(60)]

    async def whole() -> list[Any]:
        async with null_llm() as llm, serving(tmp_path / "whole", llm) as served:
            client = served.openai()
            batch = await ended(client, (await batch_of(client, jsonl(*lines))).id)
            return await lines_of(client, batch.output_file_id)

    async def begun() -> tuple[str, int]:
        async with null_llm(step_seconds=0.02) as llm, serving(tmp_path / "parts", llm) as served:
            client = served.openai()
            made = await batch_of(client, jsonl(*lines))
            batch = await until(client, made.id, lambda batch: batch.request_counts.completed > 0)
            return made.id, batch.request_counts.completed

    async def ended_later(name: str) -> list[Any]:
        async with null_llm() as llm, serving(tmp_path / "parts", llm) as served:
            client = served.openai()
            batch = await ended(client, name)
            assert (batch.status, batch.request_counts.completed) == ("completed", 60)
            return await lines_of(client, batch.output_file_id)

    expected = asyncio.run(whole())
    name, before = asyncio.run(begun())
    assert 0 < before < 60
    found = asyncio.run(ended_later(name))
    for record in (*expected, *found):
        record["response"]["body"].pop("created")
    assert found == expected


@pytest.mark.long
def test_a_cancelled_batch_keeps_what_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.02) as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            first = await batch_of(client, jsonl(*map(line, range(200))))
            second = await batch_of(client, jsonl(line(0)))
            await until(client, first.id, lambda batch: batch.request_counts.completed > 0)
            assert (await client.batches.cancel(second.id)).status == "cancelling"
            assert (await client.batches.cancel(first.id)).status == "cancelling"
            batch = await ended(client, first.id)
            assert batch.status == "cancelled"
            assert batch.cancelling_at <= batch.cancelled_at
            results = await lines_of(client, batch.output_file_id)
            assert 0 < len(results) == batch.request_counts.completed < 200
            empty = await ended(client, second.id)
            assert (empty.status, empty.output_file_id, empty.error_file_id) == ("cancelled", None, None)
            with pytest.raises(openai.BadRequestError, match="is cancelled cannot be cancelled"):
                await client.batches.cancel(first.id)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_batch_that_is_late_expires_with_what_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carryall.runtime.batch.online.batch._UNIT_SECONDS", {"h": 1})
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the journal goes after the last state

    async def scenario() -> None:
        async with null_llm(step_seconds=0.05) as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            made = await batch_of(client, jsonl(*map(line, range(400))), completion_window="2h")
            batch = await ended(client, made.id)
            assert (batch.status, batch.expires_at) == ("expired", made.created_at + 2)
            counts = batch.request_counts
            assert counts.completed + counts.failed == counts.total == 400
            errors = await lines_of(client, batch.error_file_id)
            assert {each["error"]["code"] for each in errors} == {"batch_expired"}
            assert len(errors) == counts.failed > 0
            name = made.id
        # The process may end before the last state is written: the next one comes to the same end.
        record = tmp_path / "batches" / name / "record.json"
        record.write_text(record.read_text().replace('"status": "expired"', '"status": "finalizing"'))
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            batch = await ended(client, name)
            assert batch.status == "expired"
            assert await lines_of(client, batch.error_file_id) == errors

    asyncio.run(scenario())


def test_people_who_wait_come_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            long: dict[str, Any] = {"model": "toy", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
            made = await batch_of(client, jsonl(*[line(n, **long) for n in range(40)]))
            await until(client, made.id, lambda _: llm.stats().running == 3)  # of 4 slots
            await client.completions.create(model="toy", prompt="y", max_tokens=2)
            # The lines take 4 seconds; nobody waited for one of them.
            assert (await client.batches.retrieve(made.id)).request_counts.completed == 0
            await client.batches.cancel(made.id)
            await ended(client, made.id)

    asyncio.run(scenario())


def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "_RETRY_SECONDS", 0.01)

    async def scenario() -> None:
        async with (
            null_llm(max_slots=4, max_queue=1, step_seconds=0.002) as llm,
            serving(tmp_path, llm) as served,
        ):
            client = served.openai()
            batch = await ended(client, (await batch_of(client, jsonl(*map(line, range(20))))).id)
            assert (batch.status, batch.request_counts.completed) == ("completed", 20)

    asyncio.run(scenario())


@pytest.mark.long
def test_files_and_batches_are_listed_with_cursors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            names = [(await batch_of(client, jsonl(line(n)))).id for n in range(5)]
            for name in names:
                await ended(client, name)
            page = await client.batches.list(limit=2)
            assert ([batch.id for batch in page.data], page.has_more) == (names[:-3:-1], True)
            assert [batch.id async for batch in client.batches.list(limit=2)] == names[::-1]
            inputs = [file async for file in client.files.list(purpose="batch", order="asc", limit=2)]
            assert [file.filename for file in inputs] == ["in.jsonl"] * 5
            assert len({file.id async for file in client.files.list(limit=3)}) == 10
            deleted = await client.files.delete(inputs[0].id)
            assert (deleted.id, deleted.deleted) == (inputs[0].id, True)
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await client.files.content(inputs[0].id)
            with pytest.raises(openai.BadRequestError, match="'limit' must be a whole number from 1 to 100"):
                await client.batches.list(limit=1000)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "has no line"), (b"\n\n", "has no line"), ('{"x": 1}\n'.encode("utf-16"), "is encoded as UTF-16")],
)
def test_a_file_that_cannot_be_read_fails_its_batch(tmp_path: Path, data: bytes, message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            batch = await ended(client, (await batch_of(client, data)).id)
            assert batch.status == "failed"
            assert batch.failed_at >= batch.created_at
            assert message in batch.errors.data[0].message
            assert str(tmp_path) not in batch.errors.data[0].message

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "/v1/rerank"}, "'endpoint' must be one of"),
        ({"input_file_id": "file-none"}, "there is no file 'file-none'"),
        ({"input_file_id": "../../etc/passwd"}, "there is no file"),
        ({"completion_window": "soon"}, "'completion_window' must be"),
        ({"metadata": {"a": "x" * 600}}, "'metadata' must be"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "'output_expires_after' must be"),
    ],
)
def test_invalid_batches_are_reported(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm) as served:
            client = served.openai()
            with pytest.raises(openai.APIStatusError, match=message) as error:
                await batch_of(client, jsonl(line(1)), **options)
            assert error.value.status_code == (404 if "no file" in message else 400)
            assert (await client.batches.list()).data == []

    asyncio.run(scenario())


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path, llm, max_file_bytes=5000) as served:
            client = served.openai()
            with pytest.raises(openai.BadRequestError, match="'purpose' must be 'batch'"):
                await client.files.create(file=b"x", purpose="fine-tune")
            with pytest.raises(openai.APIStatusError, match="more than 5000 bytes") as error:
                await client.files.create(file=b"x" * 6000, purpose="batch")
            assert error.value.status_code == 413
            answer = await served.post("/v1/files", file="x", purpose="batch")
            assert (answer.status_code, "multipart/form-data" in answer.text) == (400, True)
            head = {"Content-Type": "multipart/form-data; boundary=x"}
            answer = await served.client.post("/v1/files", content=b"--x\r\nnonsense", headers=head)
            assert answer.status_code == 400
            expiry: Any = {"anchor": "created_at", "seconds": 3600}
            sent = ("a/../é.jsonl", b"x" * 4000)
            file = await client.files.create(file=sent, purpose="batch", expires_after=expiry)
            assert (file.bytes, file.expires_at) == (4000, file.created_at + 3600)
            assert (await client.files.content(file.id)).content == b"x" * 4000
            assert list((tmp_path / "uploads").iterdir()) == []

    asyncio.run(scenario())


@pytest.mark.long
def test_files_and_batches_are_seen_by_their_key_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("me", "you")}
    keys.write_text("".join(f'[{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items())
                    + 'models = ["other"]\n')  # fmt: skip

    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path / "data", llm, api_keys=keys) as served:
            me, you = (served.openai().copy(api_key=name) for name in ("me", "you"))
            made = await batch_of(me, jsonl(line(1)))
            await ended(me, made.id)
            assert (await you.batches.list()).data == (await you.files.list()).data == []
            source: Any = {"input_file_id": made.input_file_id, "endpoint": URL, "completion_window": "24h"}
            for call in (
                you.batches.retrieve(made.id),
                you.batches.cancel(made.id),
                you.files.content(made.input_file_id),
                you.batches.create(**source),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            batch = await ended(you, (await batch_of(you, jsonl(line(1)))).id)
            (error,) = await lines_of(you, batch.error_file_id)
            assert "no model 'toy' that this API key may use" in error["error"]["message"]

    asyncio.run(scenario())


def test_the_lines_of_a_batch_count_for_its_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path, few="tokens_per_day = 3")

    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path / "data", llm, api_keys=keys) as served:
            client = served.openai().copy(api_key="few-key")
            made = await batch_of(client, jsonl(line(1)))
            await ended(client, made.id)
            with pytest.raises(openai.RateLimitError, match="3 tokens a day"):
                await client.completions.create(model="toy", prompt="x")

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("name", ["..%2F..%2Fkeys.toml", "%2Fetc%2Fpasswd", "file-%00", "..", "~root"])
def test_an_id_is_no_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "keys.toml").write_text("secret")

    async def scenario() -> None:
        async with null_llm() as llm, serving(tmp_path / "data" / "folder", llm) as served:
            for path in (f"/v1/files/{name}/content", f"/v1/files/{name}", f"/v1/batches/{name}"):
                answer = await served.client.get(path)
                assert (answer.status_code, "secret" in answer.text) == (404, False)
            assert (await served.client.delete(f"/v1/files/{name}")).status_code in (404, 405)
            assert (tmp_path / "keys.toml").read_text() == "secret"

    asyncio.run(scenario())


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The command, with the embedded model, and a client of it; killed at the end."""
    command = [sys.executable, "-m", "carryall", "serve", "demo", "--json", "--batch-folder", str(folder)]
    command += ["--http-port", "0", "--grpc-port", "0", "--max-slots", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["http"]
            with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
                yield process, client
        finally:
            process.kill()


@pytest.mark.slow
def test_a_batch_survives_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    data = jsonl(*[line(n, model="demo", prompt=f"def f{n}(x):", max_tokens=24) for n in range(100)])
    folder = tmp_path / "data"
    with server(folder) as (_, client):
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        name = client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"test": "kill"}
        ).id
        before = 0
    for _ in range(2):
        with server(folder) as (process, client):
            end = time.monotonic() + 120
            while (batch := client.batches.retrieve(name)).request_counts.completed <= before:
                assert time.monotonic() < end, batch
                if batch.status == "completed":
                    break
                time.sleep(0.05)
            before = batch.request_counts.completed
            process.send_signal(signal.SIGKILL)
    with server(folder) as (_, client):
        end = time.monotonic() + 240
        while (batch := client.batches.retrieve(name)).status != "completed":
            assert time.monotonic() < end, batch
            time.sleep(0.2)
        assert batch.metadata == {"test": "kill"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
        found = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert [record["custom_id"] for record in found] == [f"c{n}" for n in range(100)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(data)
    with carryall.batch.run(source, out, model="demo", loading={"max_slots": 8}) as job:
        job.wait()
    texts = [
        [record["response"]["body"]["choices"][0]["text"] for record in records]
        for records in (found, map(json.loads, out.read_text().splitlines()))
    ]
    assert texts[0] == texts[1]
