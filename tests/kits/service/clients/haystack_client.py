"""python haystack_client.py URL: Haystack's generators over OpenAI's chat."""

from __future__ import annotations

from typing import Any

from app_checks import KEY, MODEL, URL, City
from checks import check, main
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

SEEN: list[bool] = []


def weather(sunny: bool) -> str:
    """Note the call."""
    SEEN.append(sunny)
    return "noted"


WEATHER = Tool(
    name="weather",
    description="Tells the weather.",
    parameters={"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]},
    function=weather,
)


def generator(**options: Any) -> OpenAIChatGenerator:
    extra = {name: options.pop(name) for name in ("tools", "streaming_callback") if name in options}
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=URL, max_retries=0,
        generation_kwargs={"temperature": 0.0, "max_tokens": 300, **options}, **extra,
    )  # fmt: skip


def ask(**options: Any) -> ChatMessage:
    return generator(**options).run([ChatMessage.from_user("Hi")])["replies"][0]


@check
def text() -> None:
    assert ask(max_tokens=8).text is not None


@check
def streamed() -> None:
    pieces: list[Any] = []
    ask(max_tokens=8, streaming_callback=pieces.append)
    assert pieces


@check
def structured() -> None:
    assert City.model_validate_json(ask(response_format=City).text or "")


@check
def a_tool_is_called() -> None:
    message = ask(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert message.tool_calls
    (call, *_) = message.tool_calls
    assert WEATHER.invoke(**call.arguments) == "noted"
    assert SEEN
    again = [ChatMessage.from_user("Hi"), message, ChatMessage.from_tool("noted", origin=call)]
    assert generator(max_tokens=8).run(again)["replies"]


main()
