"""OpenAI's responses, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.service.http.openai.compaction import summary_messages
from carryall.runtime.text.tool_messages import as_text
from carryall.runtime.types.sampling_params import SamplingParams

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.mark.long
def test_a_response_is_what_the_engine_gives_whole_and_streamed() -> None:
    async def scenario() -> None:
        # Slower than the client, which reads the first events in the same loop.
        async with null_llm(step_seconds=0.05) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "input": "Hi", "instructions": "S", "temperature": 0}
            options["max_output_tokens"] = 12
            prompt = llm.encode("[system]S[user]Hi", add_special_tokens=False)
            *_, expected = [
                output async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
            ]
            whole = await client.responses.create(**options)
            assert whole.output_text == expected.outputs[0].text
            assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(prompt), 12)
            async with client.responses.stream(**options) as stream:
                events = [one async for one in stream]
            assert events[-1].response.output_text == whole.output_text
            kinds = [one.type for one in events]
            assert kinds[:4] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
            ]
            assert kinds[-4:] == [
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.incomplete",
            ]
            assert [one.sequence_number for one in events] == list(range(len(events)))
            deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
            assert ("".join(deltas), len(deltas) > 1) == (whole.output_text, True)

    asyncio.run(scenario())


def test_a_stored_response_is_found_continued_and_deleted() -> None:
    import openai

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, max_stored_responses=2) as served:
            client = served.openai()
            options: Any = {"model": "toy", "temperature": 0, "max_output_tokens": 6}
            first = await client.responses.create(input="Hi", **options)
            assert (await client.responses.retrieve(first.id)).output_text == first.output_text
            items = await client.responses.input_items.list(first.id)
            assert items.data[0].content == "Hi"
            second = await client.responses.create(input="More", previous_response_id=first.id, **options)
            prompt = llm.encode(f"[user]Hi[assistant]{first.output_text}[user]More", add_special_tokens=False)
            assert second.usage.input_tokens == len(prompt)
            asked = {"model": "toy", "input": "More", "previous_response_id": first.id}
            counted = (await served.post("/v1/responses/input_tokens", **asked)).json()
            assert counted == {"object": "response.input_tokens", "input_tokens": len(prompt)}
            *_, expected = [
                output async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6))
            ]
            assert second.output_text == expected.outputs[0].text
            unstored = await client.responses.create(input="x", store=False, **options)
            await client.responses.delete(second.id)
            for gone in (unstored.id, second.id):
                with pytest.raises(openai.NotFoundError, match="there is no response"):
                    await client.responses.retrieve(gone)
            for _ in range(2):
                await client.responses.create(input="x", **options)
            with pytest.raises(openai.NotFoundError, match="keeps the latest 2"):
                await client.responses.create(input="x", previous_response_id=first.id, **options)

    asyncio.run(scenario())


def test_a_conversation_is_compacted_and_continued_from_the_summary() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            first = await client.responses.create(model="toy", input="Hi", max_output_tokens=4)
            short = await client.responses.compact(model="toy", previous_response_id=first.id, input="More")
            (item,) = short.output
            assert (short.object, item.type) == ("response.compaction", "compaction")
            assert short.usage.output_tokens > 0
            summary = base64.b64decode(item.encrypted_content).decode()
            said = f"[user]Hi[assistant]{first.output_text}[user]More[user]"
            assert short.usage.input_tokens > len(llm.encode(said, add_special_tokens=False))
            turns = [item.model_dump(exclude_none=True), {"role": "user", "content": "Go on"}]
            after = await client.responses.create(model="toy", input=turns, max_output_tokens=2)
            question, answer = [turn for message in summary_messages(turns[0]) for turn in message.turns()]
            assert answer == {"role": "assistant", "content": summary}
            prompt = f"[user]{question['content']}[assistant]{summary}[user]Go on"
            assert after.usage.input_tokens == len(llm.encode(prompt, add_special_tokens=False))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": "Hi"}, "'model' must name a model"),
        ({"model": "toy"}, "there is no conversation"),
        ({"model": "toy", "input": 3}, "'input' must be a string or a list"),
        ({"model": "toy", "input": [{"type": "compaction", "encrypted_content": "?"}]}, "the service made"),
        ({"model": "toy", "input": [{"type": "compaction"}]}, "the service made"),
        ({"model": "toy", "input": "a", "previous_response_id": "no"}, "there is no response 'no'"),
    ],
)
def test_a_conversation_that_cannot_be_compacted(body: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.client.post("/v1/responses/compact", json=body)
            assert answer.status_code == (404 if "previous_response_id" in body else 400)
            assert message in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_response_in_the_background_is_polled_or_cancelled() -> None:
    import openai

    async def scenario() -> None:
        async with null_llm(step_seconds=0.002) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "input": "Hi", "background": True}
            options["extra_body"] = {"ignore_eos": True}
            one = await client.responses.create(max_output_tokens=20, **options)
            assert one.status == "in_progress"
            async with asyncio.timeout(30):
                while (found := await client.responses.retrieve(one.id)).status == "in_progress":
                    await asyncio.sleep(0.01)
            assert (found.status, found.usage.output_tokens) == ("incomplete", 20)
            endless = await client.responses.create(max_output_tokens=4000, **options)
            while not llm.stats().running:
                await asyncio.sleep(0.002)
            assert (await client.responses.cancel(endless.id)).status == "cancelled"
            async with asyncio.timeout(30):
                while llm.stats().running:
                    await asyncio.sleep(0.002)
            plain = await client.responses.create(model="toy", input="Hi", max_output_tokens=2)
            with pytest.raises(openai.BadRequestError, match="'background': true can be cancelled"):
                await client.responses.cancel(plain.id)

    asyncio.run(scenario())


def test_a_stream_in_the_background_is_left_and_followed_again() -> None:
    import openai

    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "input": "Hi", "background": True, "stream": True}
            options["extra_body"] = {"ignore_eos": True}
            seen = []
            async with await client.responses.create(max_output_tokens=40, **options) as stream:
                async for one in stream:
                    seen.append(one)
                    if one.type == "response.output_text.delta":
                        break
            name = seen[0].response.id
            assert (await client.responses.retrieve(name)).status == "in_progress"
            last = seen[-1].sequence_number
            rest = [
                one async for one in await client.responses.retrieve(name, stream=True, starting_after=last)
            ]
            events = [*seen, *rest]
            assert [one.sequence_number for one in events] == list(range(len(events)))
            whole = await client.responses.retrieve(name)
            assert events[-1].type == "response.incomplete"
            assert events[-1].response == whole
            deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
            assert "".join(deltas) == whole.output_text
            again = [one async for one in await client.responses.retrieve(name, stream=True)]
            assert again == events
            assert [
                one async for one in await client.responses.retrieve(name, stream=True, starting_after=10**6)
            ] == []
            plain = await client.responses.create(model="toy", input="Hi", max_output_tokens=2)
            with pytest.raises(openai.BadRequestError, match="have events"):
                await client.responses.retrieve(plain.id, stream=True)
            for wrong in ("x", "1.5", "9" * 30):
                answer = await served.client.get(f"/v1/responses/{name}?stream=true&starting_after={wrong}")
                assert (answer.status_code, "'starting_after' must be" in answer.text) == (400, True)
            answer = await served.client.get(f"/v1/responses/{name}?stream=yes")
            assert (answer.status_code, "'stream' must be true or false" in answer.text) == (400, True)

    asyncio.run(scenario())


def test_followers_see_that_a_response_in_the_background_was_cancelled_or_failed() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "input": "Hi", "background": True, "stream": True}
            options["extra_body"] = {"ignore_eos": True}
            stream = await client.responses.create(max_output_tokens=4000, **options)
            first = await anext(aiter(stream))
            await client.responses.cancel(first.response.id)
            assert [one async for one in stream][-1].type == "response.cancelled"
            options["extra_body"] = {"timeout": 0.01, "ignore_eos": True}
            events = [one async for one in await client.responses.create(max_output_tokens=4000, **options)]
            assert events[-1].type == "response.failed"
            assert "timeout passed" in events[-1].response.error.message
            assert (await client.responses.retrieve(events[-1].response.id)).status == "failed"

    asyncio.run(scenario())


def test_log_probabilities_are_included_if_asked_for() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.005) as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "input": "Hi", "temperature": 0, "max_output_tokens": 5}
            included = {**options, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
            prompt = llm.encode("[user]Hi", add_special_tokens=False)
            params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
            *_, expected = [output async for output in llm.generate(prompt, params)]
            tokens, entries = expected.outputs[0].token_ids, expected.outputs[0].logprobs or []
            whole = await client.responses.create(**included)
            found = whole.output[0].content[0].logprobs
            assert [one.logprob for one in found] == [
                pytest.approx(entry[token].logprob) for token, entry in zip(tokens, entries, strict=True)
            ]
            assert "".join(one.token for one in found) == whole.output_text
            for one, entry in zip(found, entries, strict=True):
                best = sorted((each for each in entry.values() if each.rank <= 2), key=lambda each: each.rank)
                assert [top.token for top in one.top_logprobs] == [each.text for each in best]
            assert whole.top_logprobs == 2
            events = [one async for one in await client.responses.create(stream=True, **included)]
            by_type = {one.type: one for one in events}
            assert by_type["response.content_part.added"].part.logprobs == []
            streamed = [
                each.logprob
                for one in events
                if one.type == "response.output_text.delta"
                for each in one.logprobs
            ]
            assert streamed == [one.logprob for one in found]
            done = by_type["response.output_text.done"]
            assert [each.logprob for each in done.logprobs] == streamed
            assert events[-1].response.output[0].content[0].logprobs == found
            without = await client.responses.create(**options)
            assert without.output[0].content[0].logprobs == []
            raw = await client.responses.with_raw_response.create(
                include=["reasoning.encrypted_content"], **options
            )
            assert raw.headers["x-carryall-ignored-fields"] == "include.reasoning.encrypted_content"

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_demanded_call_is_made_and_its_result_goes_back(choice: Any) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            client = served.openai()
            options: Any = {"model": "toy", "tools": [TOOL], "parallel_tool_calls": False}
            whole = await client.responses.create(input="Hi", tool_choice=choice, **options)
            (call,) = whole.output
            assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
            assert set(json.loads(call.arguments)) == {"city"}
            events = [
                one
                async for one in await client.responses.create(
                    input="Hi", tool_choice=choice, stream=True, **options
                )
            ]
            pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
            assert pieces  # one or several: a fast model's tokens arrive together
            assert events[-1].response.output[0].arguments == "".join(pieces)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
            after = await client.responses.create(
                input=[result], previous_response_id=whole.id, max_output_tokens=3, **options
            )
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
                {"role": "tool", "content": "dry"},
            ]
            shown = [
                {
                    "type": "function",
                    "function": {k: v for k, v in TOOL.items() if k not in ("type", "strict")},
                }
            ]
            told = as_text(messages, shown, system=True)  # the template has no place for tools
            text = "".join(f"[{one['role']}]{one['content']}" for one in told)
            assert after.usage.input_tokens == len(llm.encode(text, add_special_tokens=False))

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": []}, "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "a file must have 'file_data'"),
        ({"tools": [{"type": "function"}]}, "each tool must have a 'name'"),
        ({"text": {"format": {"type": "xml"}}}, "'response_format' must have"),
        ({"background": True, "store": False}, "requires 'store': true"),
        ({"include": "message.output_text.logprobs"}, "'include' must be a list of strings"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "logprobs"),
        ({"previous_response_id": "resp_x"}, "there is no response 'resp_x'"),
    ],
)
def test_unsupported_requests_are_refused(change: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post("/v1/responses", **{"input": "Hi", **change})
            assert answer.status_code in (400, 404)
            assert message in answer.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_is_echoed_as_an_escape(stream: bool) -> None:
    """Clients that cut texts by UTF-16 units send it, and UTF-8 cannot have it."""

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            body = {"model": "toy", "input": "Hi", "max_output_tokens": 2, "stream": stream}
            echoed = {"prompt_cache_key": "a\ud800", "metadata": {"é": "\udfff"}}
            answer = await served.client.post("/v1/responses", content=json.dumps({**body, **echoed}))
            assert answer.status_code == 200
            data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            last = json.loads(data[-1])["response"] if stream else answer.json()
            assert {name: last[name] for name in echoed} == echoed

    asyncio.run(scenario())
