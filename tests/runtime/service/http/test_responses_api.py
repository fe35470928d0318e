"""OpenAI's responses, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.service.http.openai.compaction import summary_turns
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


def test_a_response_is_what_the_engine_gives_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, http_serving(llm) as served:
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
            question, answer = summary_turns(turns[0])
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
            async with asyncio.timeout(10):
                while (found := await client.responses.retrieve(one.id)).status == "in_progress":
                    await asyncio.sleep(0.01)
            assert (found.status, found.usage.output_tokens) == ("incomplete", 20)
            endless = await client.responses.create(max_output_tokens=4000, **options)
            while not llm.stats().running:
                await asyncio.sleep(0.002)
            assert (await client.responses.cancel(endless.id)).status == "cancelled"
            async with asyncio.timeout(10):
                while llm.stats().running:
                    await asyncio.sleep(0.002)
            plain = await client.responses.create(model="toy", input="Hi", max_output_tokens=2)
            with pytest.raises(openai.BadRequestError, match="'background': true can be cancelled"):
                await client.responses.cancel(plain.id)

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
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"tools": [{"type": "web_search"}]}, "of type 'function'"),
        ({"text": {"format": {"type": "xml"}}}, "'response_format' must have"),
        ({"background": True, "stream": True}, "requires 'store': true"),
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
