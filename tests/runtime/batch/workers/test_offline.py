"""Lines through the engine: one answer each, bounded memory, faults contained."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_kit import Record, spec, toy_worker
from http_serving import http_serving
from llm_kit import toy_model
from openai.types.responses import Response
from PIL import Image
from tiny_vlms import SPECIAL, write_vlm
from vision_golden import picture

from carryall import LLM
from carryall.errors import ProviderRuntimeError
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.batch.inputs.lines import COMPLETIONS, BatchLine, parse_row
from carryall.runtime.batch.inputs.sources import SourceRow
from carryall.runtime.batch.inputs.templates import PromptTemplate
from carryall.runtime.batch.jobs.journal import LineResult
from carryall.runtime.batch.workers.offline import OfflineEngine, windows
from carryall.runtime.batch.workers.worker import Worker, WorkerSpec, open_worker
from carryall.runtime.models.loading import load_model


def lines(records: Iterable[Record]) -> Iterator[BatchLine]:
    for number, record in enumerate(records, start=1):
        line = parse_row(SourceRow(number, json.dumps(record).encode(), b"", number), PromptTemplate())
        assert isinstance(line, BatchLine), line
        yield line


def answers(worker: Worker, records: Iterable[Record]) -> dict[int, LineResult]:
    try:
        found = list(worker.run(lines(records), threading.Event()))
    finally:
        worker.close()
    assert len({answer.number for answer in found}) == len(found)
    return {answer.number: answer for answer in found}


def png(number: int) -> bytes:
    """Return a file of a picture that differs from those of other numbers."""
    file = io.BytesIO()
    Image.fromarray(picture(40, 40 + number)).save(file, "PNG")
    return file.getvalue()


def text(answer: LineResult) -> str:
    return str(json.loads(answer.record)["response"]["body"]["choices"][0]["text"])


def test_results_do_not_depend_on_what_else_runs_nor_on_the_window(tmp_path: Path) -> None:
    records = [{"prompt": f"p{n}", "max_tokens": 2 + n % 7, "temperature": n % 2} for n in range(30)]
    together = answers(toy_worker(tmp_path), records)
    alone = answers(toy_worker(tmp_path, window=1, max_slots=1), records)
    assert {n: answer.record for n, answer in together.items()} == {
        n: answer.record for n, answer in alone.items()
    }
    assert len({text(answer) for answer in alone.values()}) > 20


def test_lines_without_a_seed_get_their_own(tmp_path: Path) -> None:
    same = {"prompt": "x", "temperature": 1.0, "max_tokens": 12}
    found = answers(toy_worker(tmp_path), [same, same, {**same, "seed": 3}, {**same, "seed": 3}])
    assert text(found[1]) != text(found[2])
    assert text(found[3]) == text(found[4])


def test_prompts_with_a_common_prefix_follow_each_other(tmp_path: Path) -> None:
    prefixes = ["alpha " * 20, "beta " * 20, "gamma " * 20, "delta " * 20, "epsilon " * 20, "zeta " * 20]
    records = [{"prompt": prefixes[n % 6] + str(n)} for n in range(60)]
    sorted_ = answers(toy_worker(tmp_path, window=60, max_slots=2), records)
    unsorted = answers(toy_worker(tmp_path, window=1, max_slots=2), records)
    cached = [sum(answer.cached_tokens for answer in found.values()) for found in (sorted_, unsorted)]
    assert cached[0] > 2 * cached[1]


def test_an_endless_input_is_never_held(tmp_path: Path) -> None:
    read = 0

    def endless() -> Iterator[Record]:
        nonlocal read
        while True:
            read += 1
            yield {"prompt": "x", "max_tokens": 1}

    worker, stop = toy_worker(tmp_path, max_slots=2, window=8), threading.Event()
    ahead = []
    for count, _ in enumerate(worker.run(lines(endless()), stop), start=1):
        ahead.append(read - count)
        if count == 200:
            stop.set()
    worker.close()
    assert max(ahead) <= 4 + 2 * 8 + 2 * 8 + 1  # in the engine, ended, ready, in preparation


@pytest.mark.long
def test_pictures_are_computed_while_others_are_answered(tmp_path: Path) -> None:
    count, slots = 24, 2

    def record(number: int) -> Record:
        url = f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "ignore_eos": True}

    loading = {"provider": "cpu", "max_slots": slots}
    worker = open_worker(WorkerSpec(model=str(write_vlm(tmp_path)), loading=loading))
    assert isinstance(worker, OfflineEngine)
    sight, ahead = worker._preparer.requests.sight, []
    taken = list[int]()
    images = sight.images

    def counted(*args: Any, **named: Any) -> Any:
        taken.append(len(taken))
        return images(*args, **named)

    sight.images = counted  # type: ignore[method-assign]
    given = lines(record(number) for number in range(count))
    for answered, result in enumerate(worker.run(given, threading.Event())):
        assert result.code is None, result.record
        ahead.append(len(taken) - answered)
    worker.close()
    assert len(ahead) == len(taken) == count
    # In the engine, ended, ready and in preparation.
    assert ahead[0] < count
    assert max(ahead) <= 2 * slots + slots + 3 * slots


@pytest.mark.long
def test_places_for_pictures_that_a_line_types_stay_text(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(0)).decode()}"
    worker = open_worker(WorkerSpec(model=str(write_vlm(tmp_path)), loading={"provider": "cpu"}))
    usages = []
    for text in ("ab", f"a{''.join(SPECIAL)}b"):
        parts: list[Record] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": text},
        ]
        record = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        (result,) = worker.run(lines(iter([record])), threading.Event())
        assert result.code is None, result.record
        usages.append(json.loads(result.record)["response"]["body"]["usage"])
    worker.close()
    plain, typed = usages
    assert typed["prompt_tokens"] == plain["prompt_tokens"] + len("".join(SPECIAL))  # a byte is a token
    assert typed["prompt_tokens_details"]["images"] == plain["prompt_tokens_details"]["images"]


def test_a_window_of_long_lines_is_short() -> None:
    long = [BatchLine(n, "", COMPLETIONS, {"prompt": "x" * 2**22}) for n in range(12)]
    assert [len(window) for window in windows(iter(long), 100)] == [5, 5, 2]


def test_a_window_ends_where_no_line_will_come_before_answers() -> None:
    line = BatchLine(1, "", COMPLETIONS, {})
    assert [len(window) for window in windows(iter([line, line, None, None, line]), 100)] == [2, 1]


def test_lines_of_a_pipe_do_not_wait_for_a_window() -> None:
    assert spec(["-"], "out.jsonl").worker("demo", 0).window == 1
    assert spec(["in.jsonl"], "out.jsonl").worker("demo", 0).window > 100


@pytest.mark.parametrize(
    ("record", "code", "message"),
    [
        ({"prompt": "x", "max_tokens": -3}, "invalid_request", "max_tokens"),
        ({"prompt": "x", "top_q": 1}, "invalid_request", "did you mean"),
        ({"prompt": [999_999]}, "invalid_request", "outside the vocabulary"),
        ({"prompt": "x" * 5000}, "invalid_request", "the context holds 256"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "each message"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": []}},
            "invalid_request",
            "must not contain 'tools'",
        ),
        ({"input": []}, "invalid_request", "'input' must be"),
        ({"input": "x", "dimensions": 0}, "invalid_request", "'dimensions' must be"),
        ({"input": "x", "dimension": 8}, "invalid_request", "unknown field 'dimension'"),
        ({"input": "x", "pooling": "max"}, "invalid_request", "pooling"),
        ({"query": "x", "documents": [5]}, "invalid_request", "'documents' must be"),
        ({"text": 5, "continuations": ["a"]}, "invalid_request", "give either 'text'"),
        ({"messages": [], "continuations": ["a"]}, "invalid_request", "give either 'text'"),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "continuations": ["a"],
                "chat_template_kwargs": {"tools": []},
            },
            "invalid_request",
            "reserved",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}]},
            "invalid_request",
            "tools.web_search",
        ),
        ({"prompt": "x", "structured_output": {"regex": "("}}, "invalid_request", "regex"),
    ],
)
def test_a_faulty_line_fails_alone(tmp_path: Path, record: Record, code: str, message: str) -> None:
    found = answers(toy_worker(tmp_path), [{"prompt": "a"}, record, {"prompt": "b"}])
    assert [found[n].code for n in (1, 2, 3)] == [None, code, None]
    error = json.loads(found[2].record)["error"]
    assert (error["code"], error["line"]) == (code, 2)
    assert message in error["message"]


def test_a_timeout_is_called_one_and_begins_when_the_line_does(tmp_path: Path) -> None:
    slow = {"prompt": "x", "ignore_eos": True, "max_tokens": 200}
    records: list[Record] = [slow, {**slow, "timeout": 0.02}, {"prompt": "y", "max_tokens": 1, "timeout": 5}]
    found = answers(toy_worker(tmp_path, max_slots=1, step_seconds=0.001), records)
    assert [found[n].code for n in (1, 2, 3)] == [None, "timeout", None]
    assert "timeout passed" in json.loads(found[2].record)["error"]["message"]


def failing(worker: OfflineEngine, what: BaseException) -> OfflineEngine:
    def fail(rows: object) -> None:
        raise what

    worker.engine.runner.before_forward = fail  # type: ignore[attr-defined]
    return worker


def test_a_failing_device_fails_lines(tmp_path: Path) -> None:
    worker = failing(toy_worker(tmp_path), ProviderRuntimeError("the device is on fire"))
    found = answers(worker, [{"prompt": "a"}, {"prompt": "b"}])
    assert {answer.code for answer in found.values()} == {"server_error"}
    assert "on fire" in json.loads(found[1].record)["error"]["message"]


def test_a_lost_device_ends_the_run(tmp_path: Path) -> None:
    worker = failing(toy_worker(tmp_path), ProviderRuntimeError("the device is on fire"))
    with pytest.raises(ProviderRuntimeError, match=r"the last 100 lines failed.*on fire"):
        answers(worker, [{"prompt": "a"}] * 500)


def test_an_error_while_reading_ends_the_run(tmp_path: Path) -> None:
    def broken() -> Iterator[Record]:
        yield {"prompt": "a"}
        raise OSError("the disk was pulled")

    with pytest.raises(OSError, match="pulled"):
        answers(toy_worker(tmp_path, window=1), broken())
    # Threads that other tests left, such as a "carryall-batcher", are none of this one's.
    assert "carryall-batch-reader" not in {thread.name for thread in threading.enumerate()}


def body(answer: LineResult) -> Any:
    return json.loads(answer.record)["response"]["body"]


def test_a_chat_is_answered_with_tokens_counted(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2}
    (answer,) = answers(toy_worker(tmp_path), [record]).values()
    found = body(answer)
    assert found["object"] == "chat.completion"
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == answer.completion_tokens == 8
    assert (answer.finish_reason, answer.worker) == ("length", "here")


@pytest.mark.long
def test_a_response_is_the_chat_in_another_shape(tmp_path: Path) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    asked = {"input": items, "instructions": "Be brief.", "max_output_tokens": 4, "top_logprobs": 1,
             "include": ["message.output_text.logprobs"]}  # fmt: skip
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    found = answers(
        toy_worker(tmp_path),
        [
            {"custom_id": "r", "url": "/v1/responses", "body": asked},
            {"messages": chat, "max_tokens": 4, "logprobs": True, "top_logprobs": 1},
            {"custom_id": "s", "url": "/v1/responses",
             "body": {"input": "x", "text": form, "max_output_tokens": 40}},
            {"custom_id": "t", "url": "/v1/responses", "body": {"input": "x", "previous_response_id": "y"}},
            {"custom_id": "u", "url": "/v1/responses", "body": {"input": "x", "include": ["a.b"]}},
        ],
    )  # fmt: skip
    response, extracted = (Response.construct(**body(found[number])) for number in (1, 3))
    assert response.output_text == body(found[2])["choices"][0]["message"]["content"] != ""
    assert (response.status, response.id) == ("incomplete", "resp_batch_req_1")
    usage = body(found[2])["usage"]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage["prompt_tokens"], 4)
    assert json.loads(extracted.output_text) == {"a": 1}
    assert (
        body(found[1])["output"][0]["content"][0]["logprobs"]
        == body(found[2])["choices"][0]["logprobs"]["content"]
    )
    assert found[4].code == "invalid_request"
    assert (found[5].code, "include.a.b" in str(found[5])) == ("invalid_request", True)


@pytest.mark.long
def test_embeddings_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    texts = ["def f(x):", "class Stack:", "import os"]
    asks: list[Record] = [
        {"input": texts},
        {"input": texts[1], "encoding_format": "base64", "pooling": "mean", "normalize": False},
        {"input": texts, "prompt_name": "query"},
    ]
    worker = open_worker(WorkerSpec(model="demo", loading={"max_slots": 4}))
    found = answers(worker, asks)
    data = body(found[1])["data"]
    assert [each["index"] for each in data] == [0, 1, 2]
    assert (found[3].code, "has no prompts by name" in str(found[3])) == ("invalid_request", True)
    raw = base64.b64decode(body(found[2])["data"][0]["embedding"])
    with LLM("demo", max_slots=4) as llm:
        np.testing.assert_allclose(
            [each["embedding"] for each in data], llm.embed(texts), rtol=1e-5, atol=1e-6
        )
        expected = llm.embed(texts[1], pooling="mean", normalize=False)[0]
        assert body(found[1])["usage"]["prompt_tokens"] == sum(len(llm.encode(text)) for text in texts)
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("url", ["/v1/score", "/v1/rerank"])
def test_scores_are_those_of_the_library(tmp_path: Path, url: str) -> None:
    documents = ["abc", "xyz", "abd"]
    asks: dict[str, Record] = {
        "/v1/score": {"text": "ab", "continuations": documents},
        "/v1/rerank": {"query": "ab", "documents": documents, "top_n": 2, "return_documents": True},
    }
    (answer,) = answers(toy_worker(tmp_path, context_length=2048), [asks[url]]).values()
    found = body(answer)
    with LLM(toy_model(tmp_path, context_length=2048)) as llm:
        if url == "/v1/score":
            expected = llm.score("ab", documents)
            assert [each["score"] for each in found["data"]] == [each.logprob for each in expected]
            assert [each["greedy"] for each in found["data"]] == [each.greedy for each in expected]
        else:
            scores = llm.rerank("ab", documents)
            best = sorted(range(3), key=lambda index: -scores[index])[:2]
            assert [each["index"] for each in found["results"]] == best
            assert [each["relevance_score"] for each in found["results"]] == [scores[i] for i in best]
            assert found["results"][0]["document"] == {"text": documents[best[0]]}


DOCUMENTS = ["abc", {"text": "xyz"}, "abd"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("url", "asks"),
    [
        (
            "/v1/embeddings",
            [
                {"input": ["a", "b"], "dimensions": 8},
                {"input": "a", "dimensions": 8, "normalize": False},
                {"input": ["def f(x): " * 999, [7] * 9999], "dimensions": 8, "truncate": True},
            ],
        ),
        (
            "/v1/rerank",
            [
                {"query": "ab", "documents": DOCUMENTS},
                {"query": "ab", "documents": DOCUMENTS, "return_documents": False, "top_n": 1},
            ],
        ),
        (
            "/v1/score",
            [
                {"text": "ab", "continuations": ["abc", "xyz"]},
                {"text_1": "ab", "text_2": ["abc", "xyz"]},
                {"queries": ["ab", "x"], "documents": ["abc", "xyz"], "instruction": "Which?"},
            ],
        ),
    ],
)
def test_a_line_is_answered_as_the_service_answers_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, asks: list[Record]
) -> None:
    """Bodies with and without each option, so that the defaults are compared too."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    if url == "/v1/embeddings":
        worker: Worker = open_worker(WorkerSpec(model="demo"))
        model = load_model("demo")
    else:
        worker = toy_worker(tmp_path, context_length=2048)
        model = toy_model(tmp_path / "online", context_length=2048)
    found = answers(worker, [{"custom_id": str(n), "url": url, "body": ask} for n, ask in enumerate(asks)])

    async def online() -> list[Any]:
        llm = AsyncLLM(model)
        try:
            async with http_serving(llm) as served:
                replies = [await served.post(url, **ask) for ask in asks]
                return [reply.json() for reply in replies]
        finally:
            llm.shutdown()

    for number, expected in enumerate(asyncio.run(online()), 1):
        answer = body(found[number])
        for name in ("id", "model", "usage"):
            answer.pop(name, None)
            expected.pop(name, None)
        if url != "/v1/embeddings":
            assert answer == expected
            continue
        for ours, theirs in zip(answer["data"], expected["data"], strict=True):
            assert len(ours["embedding"]) == 8
            np.testing.assert_allclose(ours["embedding"], theirs["embedding"], rtol=1e-5, atol=1e-6)
