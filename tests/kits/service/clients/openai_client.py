"""python openai_client.py URL: what users of OpenAI's client do."""

from __future__ import annotations

import sys
from typing import Any, Literal

import openai
from checks import check, main
from pydantic import BaseModel

CLIENT = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
TURNS: Any = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ONE_CALL: Any = {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 2000}
EXACT: Any = {"extra_body": {"ignore_eos": True}}


class City(BaseModel):
    """A structured answer."""

    name: Literal["Paris", "Rome"]
    coastal: bool


@check
def chat() -> None:
    answer = CLIENT.chat.completions.create(model="toy", messages=TURNS, max_tokens=5, n=2, **EXACT)
    assert answer.usage
    assert answer.usage.completion_tokens == 10
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


@check
def chat_stream() -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        CLIENT.chat.completions.create(
            model="toy", messages=TURNS, max_tokens=5, stream=True, stream_options=options, **EXACT
        )
    )
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


@check
def chat_tools() -> None:
    answer = CLIENT.chat.completions.create(
        model="toy",
        messages=TURNS,
        tools=TOOLS,
        tool_choice="required",
        **ONE_CALL,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    turn: Any = answer.choices[0].message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    CLIENT.chat.completions.create(model="toy", messages=[*TURNS, turn, result], tools=TOOLS, max_tokens=3)


@check
def chat_tools_stream() -> None:
    with CLIENT.chat.completions.stream(
        model="toy",
        messages=TURNS,
        tools=TOOLS,
        tool_choice="required",
        **ONE_CALL,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.choices[0].message.tool_calls


@check
def structured_output() -> None:
    for seed in range(10):  # a random model may write blanks without end
        try:
            answer = CLIENT.chat.completions.parse(
                model="toy", messages=TURNS, response_format=City, max_tokens=100, temperature=1.5, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, City)
        return
    raise AssertionError("no answer came to its end")


@check
def completions_echo() -> None:
    answer = CLIENT.completions.create(
        model="toy", prompt=["def f", "x = "], max_tokens=1, logprobs=2, echo=True, **EXACT
    )
    assert [choice.text[:5] for choice in answer.choices] == ["def f", "x = "] or answer.choices[0].text
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.token_logprobs
    assert logprobs.token_logprobs[0] is None


@check
def responses() -> None:
    first = CLIENT.responses.create(model="toy", input="Hi", max_output_tokens=4, **EXACT)
    assert CLIENT.responses.retrieve(first.id).output_text == first.output_text
    CLIENT.responses.create(model="toy", input="More", previous_response_id=first.id, max_output_tokens=4)
    CLIENT.responses.delete(first.id)
    try:
        CLIENT.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


@check
def responses_stream() -> None:
    stream = CLIENT.responses.create(model="toy", input="Hi", max_output_tokens=4, stream=True, **EXACT)
    events: list[Any] = list(stream)
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.usage.output_tokens == 4
    assert [event.sequence_number for event in events] == list(range(len(events)))


@check
def embeddings() -> None:
    found = CLIENT.embeddings.create(model="vectors", input=["a", "b"])
    assert len(found.data) == 2
    assert len(found.data[0].embedding) == 6


@check
def models() -> None:
    assert {one.id for one in CLIENT.models.list()} == {"toy", "vectors"}
    assert CLIENT.models.retrieve("toy").id == "toy"


@check
def errors() -> None:
    for kind, options in ((openai.NotFoundError, {"model": "none"}), (openai.BadRequestError, {"top_p": 7})):
        given: Any = {"model": "toy", "messages": TURNS, **options}
        try:
            CLIENT.chat.completions.create(**given)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


main()
