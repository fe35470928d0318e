"""Long prompts and agents' sessions: progress, pins, and turns that cost their new tokens only."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm, null_model
from scripted_model import Turn, scripted_llm
from tiny_models import write_tiny

from carryall.providers.base import Row
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.engine.engine import EngineConfig
from carryall.runtime.service.core import handler

LONG = "word " * 1500
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]


def test_progress_of_a_prompt_is_told_while_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "PROGRESS_SECONDS", 0.01)

    async def scenario() -> None:
        async with null_llm(step_seconds=0.03) as llm, http_serving(llm) as served:
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"chat {LONG}"}]}),
                ("/v1/completions", {"prompt": f"text {LONG}"}),
            ):
                asked: Any = {**body, "max_tokens": 2, "stream": True, "return_progress": True}
                events = await served.events(path, **asked)
                told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
                assert len(told) >= 2
                done = [each["processed"] for each in told]
                assert done == sorted(done)
                assert len(set(done)) > 1
                assert all(each["total"] > 1500 >= each["cache"] for each in told)
                assert done[-1] <= told[0]["total"]
                first = next(i for i, event in enumerate(events) if "prompt_progress" in event)
                assert not any("prompt_progress" in event for event in events[first + len(told) : -1])
                plain = await served.events(path, **{**asked, "return_progress": False})
                assert not any("prompt_progress" in event for event in plain[:-1])
            answer = await served.post(path, **{**asked, "return_progress": 5})
            assert (answer.status_code, "return_progress" in answer.text) == (400, True)

    asyncio.run(scenario())


PROMISE = "X-Carryall-First-Token-Seconds"
TOKEN_SECONDS = 0.0005


def slow_prompts(rows: Sequence[Row]) -> None:
    """Take half a millisecond a token of a prompt, and 2 ms a step."""
    prompts = sum(len(row.tokens) for row in rows if len(row.tokens) > 1)
    time.sleep(0.002 + prompts * TOKEN_SECONDS)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.mark.long
def test_the_first_token_is_promised_once_prompts_were_measured() -> None:
    async def scenario() -> None:
        async with null_llm(before_forward=slow_prompts) as llm, http_serving(llm) as served:

            async def first_token(prompt: str) -> tuple[float | None, float]:
                """What was promised for a prompt, and what its tokens take."""
                body: Any = {"prompt": prompt, "max_tokens": 2, "stream": True}
                async with served.client.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
                    seconds = answer.headers.get(PROMISE)
                    await answer.aread()
                return (None if seconds is None else float(seconds)), len(llm.encode(prompt)) * TOKEN_SECONDS

            assert (await first_token("x"))[0] is None  # nothing was measured
            assert (await first_token(words(400, 0)))[0] is None
            promised, due = await first_token(words(400, 1))
            assert promised == pytest.approx(due, rel=0.3)
            cached, _ = await first_token(words(400, 1))
            assert cached is not None
            assert cached < due / 20
            two = [asyncio.create_task(first_token(words(400, seed))) for seed in (2, 3)]
            later = max(promised or 0 for promised, _ in [await task for task in two])
            assert later == pytest.approx(2 * due, rel=0.4)
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
                ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
                (
                    "/api/chat",
                    {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}},
                ),
            ):
                answer = await served.post(path, **body, model="toy", stream=True)
                assert float(answer.headers[PROMISE]) < 0.1, path
            assert PROMISE not in (await served.client.get("/v1/models")).headers

    asyncio.run(scenario())


@pytest.mark.long
def test_too_many_queued_tokens_ask_to_retry_when_there_is_room() -> None:
    async def scenario() -> None:
        model = null_model(before_forward=slow_prompts)
        llm = AsyncLLM(model, engine_config=EngineConfig(max_queued_tokens=3000))
        async with http_serving(llm) as served:
            for seed in (0, 1):  # measured
                await served.post("/v1/completions", prompt=words(400, seed), max_tokens=1)
            long = asyncio.create_task(served.post("/v1/completions", prompt=words(700, 2), max_tokens=1))
            while not (llm.stats().running or long.done()):
                await asyncio.sleep(0.001)
            tokens = len(llm.encode(words(700, 3)))
            answer = await served.post("/v1/completions", prompt=words(700, 3), max_tokens=1)
            assert answer.status_code == 429
            assert f"with {tokens} more they exceed max_queued_tokens, 3000" in answer.text
            assert 1 <= int(answer.headers["retry-after"]) <= 1 + 2 * tokens * TOKEN_SECONDS
            short = await served.post("/v1/completions", prompt="x", max_tokens=1)
            assert (await long).status_code == short.status_code == 200
        llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.long
def test_a_storm_of_long_prompts_is_refused_in_each_api_and_leaves_no_tokens_queued() -> None:
    """Half of the clients leave at once; what they had queued is free for others."""

    def turns(seed: int) -> Any:
        return [{"role": "user", "content": words(200, seed)}]

    doors: list[tuple[str, Any, Any]] = [
        ("/v1/chat/completions", lambda n: {"messages": turns(n), "max_tokens": 1},
         lambda error: error["error"]["type"]),
        ("/v1/responses", lambda n: {"input": turns(n), "max_output_tokens": 1},
         lambda error: error["error"]["type"]),
        ("/v1/messages", lambda n: {"messages": turns(n), "max_tokens": 1},
         lambda error: error["error"]["type"]),
        ("/api/chat", lambda n: {"messages": turns(n), "options": {"num_predict": 1}},
         lambda error: error["error"]),
    ]  # fmt: skip
    kinds = {}

    async def scenario() -> None:
        model = null_model(before_forward=slow_prompts)
        tokens = len(model.tokenizer.encode(words(200, 0)))  # type: ignore[union-attr]
        llm = AsyncLLM(model, engine_config=EngineConfig(max_queued_tokens=3 * tokens))
        async with http_serving(llm) as served:

            async def ask(number: int) -> int:
                path, body, kind = doors[number % len(doors)]
                leaves = number % 8 < 4
                asked = {"model": "toy", "stream": leaves, **body(number)}
                async with served.client.stream("POST", path, json=asked) as answer:
                    if leaves and answer.status_code == 200:
                        return 200
                    text = await answer.aread()
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    kinds[path] = kind(json.loads(text))
                return answer.status_code

            codes = await asyncio.gather(*(ask(number) for number in range(64)))
            assert set(codes) == {200, 429}
            assert kinds.keys() == {path for path, _, _ in doors}
            async with asyncio.timeout(30):
                while llm.stats().running or llm.stats().waiting:
                    await asyncio.sleep(0.01)
            assert llm.stats().failed == 0
            again = [
                served.post("/v1/completions", prompt=words(200, 70 + n), max_tokens=1) for n in range(2)
            ]
            assert [answer.status_code for answer in await asyncio.gather(*again)] == [200] * 2
        llm.shutdown()

    asyncio.run(scenario())
    assert kinds["/v1/messages"] == "rate_limit_error"
    assert "exceed max_queued_tokens" in kinds["/api/chat"]


def test_tokens_are_returned_as_vllm_names_them() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            asked: Any = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
            chat: Any = {"messages": [{"role": "user", "content": "def f("}], **asked}
            whole = (await served.post("/v1/chat/completions", **chat)).json()
            prompt = llm.encode("[user]def f(", add_special_tokens=False)
            assert whole["prompt_token_ids"] == prompt
            tokens = whole["choices"][0]["token_ids"]
            assert llm.decode(tokens) == whole["choices"][0]["message"]["content"]
            assert len(tokens) == 5
            chunks = (await served.events("/v1/chat/completions", **chat, stream=True))[:-1]
            assert chunks[0]["prompt_token_ids"] == prompt
            pieces = [choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]]
            assert [token for piece in pieces for token in piece] == tokens

            text: Any = {"prompt": ["def f(", "x"], **asked}
            (first, second) = (await served.post("/v1/completions", **text)).json()["choices"]
            assert first["prompt_token_ids"] == llm.encode("def f(")
            assert second["prompt_token_ids"] == llm.encode("x")
            assert llm.decode(first["token_ids"]) == first["text"]
            streamed: Any = {**text, "prompt": "def f("}
            chunks = (await served.events("/v1/completions", **streamed, stream=True))[:-1]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert choices[0]["prompt_token_ids"] == first["prompt_token_ids"]
            pieces = [choice.get("token_ids", []) for choice in choices]
            assert [token for piece in pieces for token in piece] == first["token_ids"]
            plain = (await served.post("/v1/completions", prompt="x", max_tokens=1)).json()
            assert "token_ids" not in plain["choices"][0]

    asyncio.run(scenario())


def turns_of_a_session() -> list[dict[str, Any]]:
    """The messages of an agent: a long prompt of the system, then results of tools of random words."""
    source = random.Random(0)
    text = " ".join(source.choices(WORDS, k=300))
    asked = [f"turn {turn} " + " ".join(source.choices(WORDS, k=8)) for turn in range(30)]
    return [{"role": "system", "content": text}, *({"role": "user", "content": each} for each in asked)]


@pytest.mark.long
@pytest.mark.parametrize("door", ["openai", "anthropic", "responses"])
def test_each_turn_of_a_session_computes_its_new_tokens_only(door: str) -> None:
    system, *questions = turns_of_a_session()

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            talk: list[dict[str, Any]] = []
            before = 0  # tokens of the whole conversation after the turn before
            for number, question in enumerate(questions):
                talk.append(question)
                computed = llm.stats().computed_tokens
                if door == "openai":
                    body: Any = {"messages": [system, *talk], "max_tokens": 8, "temperature": 0}
                    answer = (await served.post("/v1/chat/completions", **body)).json()
                    text = answer["choices"][0]["message"]["content"]
                    total = answer["usage"]["prompt_tokens"]
                    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                elif door == "anthropic":
                    body = {"system": system["content"], "messages": talk, "max_tokens": 8, "temperature": 0}
                    answer = (await served.post("/v1/messages", **body)).json()
                    text = answer["content"][0]["text"]
                    cached = answer["usage"]["cache_read_input_tokens"]
                    total = cached + answer["usage"]["input_tokens"]
                else:
                    body = {"instructions": system["content"], "input": talk, "max_output_tokens": 8}
                    answer = (await served.post("/v1/responses", **body, temperature=0)).json()
                    text = answer["output"][0]["content"][0]["text"]
                    total = answer["usage"]["input_tokens"]
                    cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
                talk.append({"role": "assistant", "content": text})
                spent = llm.stats().computed_tokens - computed
                new = total - before
                if number:
                    # The last token of an answer has no KV, and tokens at the seams may be others when the
                    # whole text is tokenized again.
                    assert cached >= before - 8 - 6
                    assert spent <= new + 8 + 6, number
                before = total
            assert total > 1500

    asyncio.run(scenario())


def test_a_thought_is_ended_while_it_is_written(tmp_path: Path) -> None:
    """By llama.cpp's endpoint; another answer's id, and one that was not asked so, change nothing."""
    thought = "I think. " * 200

    async def scenario() -> None:
        async with (
            scripted_llm(tmp_path, lambda turns: f"<thought>\n{thought}\n</thought>\n\nYes.",
                         thoughts="thoughts") as llm,
            http_serving(llm) as served,
        ):  # fmt: skip

            async def answer(ends: bool, **fields: Any) -> tuple[str, str, Any]:
                """The thought, the text, and what the endpoint said."""
                body: Any = {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
                texts, told = {"reasoning_content": "", "content": ""}, None
                async with served.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                    async for line in stream.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        chunk = json.loads(line.removeprefix("data: "))
                        for choice in chunk["choices"]:
                            for name in texts:
                                texts[name] += choice["delta"].get(name) or ""
                        if ends and told is None and texts["reasoning_content"]:
                            ending = {"id": chunk["id"], "action": "reasoning_end"}
                            told = (await served.post("/v1/chat/completions/control", **ending)).json()
                return texts["reasoning_content"], texts["content"], told

            full, _, told = await answer(ends=True)
            assert full == thought.strip()
            assert told["success"] is False
            assert "reasoning_control" in told["message"]
            cut, _, told = await answer(ends=True, reasoning_control=True, reasoning_budget_message=" So.")
            assert told == {"success": True}
            assert len(cut) < len(full)
            assert cut.endswith(" So.")
            cut, _, _ = await answer(ends=False, reasoning_budget=5, reasoning_budget_message=" Enough.")
            assert cut.endswith(" Enough.")
            assert len(cut) < 40
            for wrong in (
                {"id": "x", "action": "stop"},
                {"action": "reasoning_end"},
                {"id": 5, "action": "x"},
            ):
                assert (await served.post("/v1/chat/completions/control", **wrong)).status_code == 400
            gone = await served.post("/v1/chat/completions/control", id="chatcmpl-x", action="reasoning_end")
            assert gone.json()["success"] is False

    asyncio.run(scenario())


def test_the_service_has_a_budget_and_a_message_for_thoughts(tmp_path: Path) -> None:
    talk: Any = {"messages": [{"role": "user", "content": "x"}]}

    async def scenario() -> None:
        def rule(turns: list[Turn]) -> str:
            return f"<thought>\n{'I think. ' * 50}\n</thought>\n\nYes."

        own: Any = {"reasoning_budget": 5, "reasoning_budget_message": " Over."}
        async with (
            scripted_llm(tmp_path, rule, thoughts="thoughts") as llm,
            http_serving(llm, **own) as served,
        ):
            for fields, ending, most in (
                ({}, " Over.", 40),
                ({"reasoning_budget_message": " Mine."}, " Mine.", 40),
                ({"reasoning_budget": 1000}, "think.", 1000),
            ):
                answer = await served.post("/v1/chat/completions", **talk, **fields)
                thought = answer.json()["choices"][0]["message"]["reasoning_content"]
                assert thought.endswith(ending)
                assert len(thought) < most

    asyncio.run(scenario())


@pytest.mark.slow
def test_thirty_turns_up_to_30000_tokens_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after 20 other conversations on 4 slots, and in another process of the service.

    With ``-s``, each turn is printed: its prompt, what was computed and what was new.
    """
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    folder = write_tiny("llama", tmp_path / "model", max_position_embeddings=65_536)  # a byte is a token
    talk: list[dict[str, Any]] = [{"role": "system", "content": words(160, 0)}]
    known = 0  # tokens of the conversation up to the end of the last answer

    async def turn(served: HttpServed, label: str, spare: int = 0) -> None:
        nonlocal known
        talk.append({"role": "user", "content": words(160, len(talk))})
        begin = time.monotonic()
        body: Any = {"messages": talk, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = await served.post("/v1/chat/completions", **body)
        usage = answer.json()["usage"]
        talk.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        new = usage["prompt_tokens"] - known
        seconds = time.monotonic() - begin
        with capsys.disabled():
            print(f"{label}: {usage['prompt_tokens']:6} {computed:6} {new:6} {seconds:6.2f} s")
        assert computed <= new + spare, label
        known = usage["prompt_tokens"]

    async def scenario() -> None:
        options: Any = {"provider": "cpu", "max_slots": 4, "context_length": 40_000}
        llm = AsyncLLM(folder, prefix_cache_dir="auto", **options)
        async with http_serving(llm) as served:
            for number in range(1, 31):
                await turn(served, f"turn {number}")
            for number in range(20):
                other = [{"role": "user", "content": f"{number} {words(300, 1000 + number)}"}]
                answer = await served.post("/v1/chat/completions", messages=other, max_tokens=4)
                assert answer.status_code == 200
            await turn(served, "after 20 other conversations", spare=64)  # files hold whole chunks
        llm.shutdown()
        llm = AsyncLLM(folder, prefix_cache_dir="auto", **options)
        async with http_serving(llm) as served:
            await turn(served, "after a restart", spare=64)
        llm.shutdown()
        assert known > 30_000

    asyncio.run(scenario())


def test_a_prompt_of_a_client_that_leaves_is_kept() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.02) as llm, http_serving(llm) as served:
            body: Any = {"prompt": LONG + LONG, "max_tokens": 4, "stream": True}
            async with served.client.stream("POST", "/v1/completions", json=body):
                while llm.stats().computed_tokens < 600:  # some chunks, not all
                    await asyncio.sleep(0.01)
            while llm.stats().running:
                await asyncio.sleep(0.01)
            kept = llm.stats().computed_tokens
            assert 600 <= kept < 2900
            answer = (await served.post("/v1/completions", prompt=LONG + LONG, max_tokens=4)).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= kept - 1

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "pin"),
    [
        ("/v1/completions", {"prompt": "PINNED"}, {"prompt_cache_key": "k"}),
        ("/v1/completions", {"prompt": "PINNED"}, {"prompt_cache_retention": "24h"}),
        ("/v1/responses", {"input": "PINNED"}, {"prompt_cache_key": "k"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "PINNED"}], "max_tokens": 2},
         {"cache_control": {"type": "ephemeral"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "PINNED"}], "max_tokens": 2},
         {"system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}),
    ],
)  # fmt: skip
def test_a_pinned_prefix_outlives_others(path: str, body: dict[str, Any], pin: dict[str, Any]) -> None:
    long = " ".join(f"token{number}" for number in range(40))

    async def cached(pinned: bool) -> int:
        async with null_llm(max_slots=4) as llm, http_serving(llm) as served:
            asked = {**json.loads(json.dumps(body).replace("PINNED", long)), **(pin if pinned else {})}
            if "system" in pin and not pinned:
                asked["system"] = "be"
            assert (await served.post(path, **asked)).status_code == 200
            for number in range(8):  # twice as many as there are slots
                await served.post("/v1/completions", prompt=f"{number} other", max_tokens=2)
            before = llm.stats().prefix_cached_tokens
            await served.post(path, **asked)
            return llm.stats().prefix_cached_tokens - before

    assert asyncio.run(cached(True)) > 30
    assert asyncio.run(cached(False)) < 30


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "prompt_cache_key": 5}),
        ("/v1/completions", {"prompt": "x", "prompt_cache_retention": "forever"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "cache_control": "yes"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "cache_control": {"type": "x"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}],
                          "cache_control": {"type": "ephemeral", "ttl": "1d"}}),
    ],
)  # fmt: skip
def test_wrong_pins_are_errors(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(path, **{"max_tokens": 1, **body})
            assert (answer.status_code, "cache" in answer.text) == (400, True), answer.text

    asyncio.run(scenario())


def test_a_prefix_survives_other_conversations_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    prompt = "a beginning of some length, " * 20

    def loaded() -> AsyncLLM:
        model = null_model(max_slots=4)
        model.identity = "toy"
        return AsyncLLM(model, engine_config=EngineConfig(prefix_cache_dir="auto"))

    async def scenario() -> None:
        for others in (20, 0):  # the second process begins with an empty memory
            llm = loaded()
            async with http_serving(llm) as served:
                ask: Any = {"prompt": prompt, "max_tokens": 2}
                first = (await served.post("/v1/completions", **ask)).json()
                for number in range(others):
                    await served.post("/v1/completions", prompt=f"{number} another talk " * 10, max_tokens=2)
                again = (await served.post("/v1/completions", **ask)).json()
                usage = [answer["usage"] for answer in (first, again)]
                cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
                assert cached[1] >= usage[1]["prompt_tokens"] - 64
                assert (cached[0] == 0) is bool(others)
            llm.shutdown()

    asyncio.run(scenario())
    assert (tmp_path / "prefixes").stat().st_mode & 0o077 == 0


def test_a_socket_in_the_file_system_serves_this_user(tmp_path: Path) -> None:
    import httpx2

    path = tmp_path / "carryall.sock"

    async def scenario() -> None:
        for _ in range(2):
            async with null_llm() as llm, http_serving(llm, unix_socket=path) as served:
                assert path.stat().st_mode & 0o177 == 0
                transport = httpx2.AsyncHTTPTransport(uds=str(path))
                async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                    answers = [await one.get("/v1/models") for one in (client, served.client)]
                assert answers[0].json() == answers[1].json()
            assert not path.exists()

    asyncio.run(scenario())
