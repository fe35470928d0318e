"""python autogen_client.py URL: AutoGen's agents over OpenAI's chat."""

from __future__ import annotations

import asyncio
from typing import Any

from app_checks import KEY, MODEL, URL, City
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import check, main

SEEN: list[bool] = []


def weather(sunny: bool) -> str:
    """Tell the weather."""
    SEEN.append(sunny)
    return "noted"


def client(**options: Any) -> OpenAIChatCompletionClient:
    facts: Any = {
        "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
        "family": "unknown", "multiple_system_messages": True,
    }  # fmt: skip
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=URL, api_key=KEY, model_info=facts, max_retries=0, temperature=0.0, **options
    )


@check
def text_and_stream() -> None:
    async def run() -> None:
        asked = [UserMessage(content="Hi", source="user")]
        assert isinstance((await client(max_tokens=8).create(asked)).content, str)
        assert [piece async for piece in client(max_tokens=8).create_stream(asked)]

    asyncio.run(run())


@check
def structured() -> None:
    async def run() -> None:
        asked = [UserMessage(content="Hi", source="user")]
        answer = await client(max_tokens=300).create(asked, json_output=City)
        assert City.model_validate_json(str(answer.content))

    asyncio.run(run())


@check
def a_tool_is_called() -> None:
    async def run() -> None:
        asked = [UserMessage(content="Hi", source="user")]
        tool = FunctionTool(weather, description="Tells the weather.", strict=True)
        answer = await client(max_tokens=300).create(asked, tools=[tool], tool_choice=tool)
        assert not isinstance(answer.content, str)
        assert answer.content[0].name == "weather"

    asyncio.run(run())


@check
def an_agent_answers() -> None:
    async def run() -> None:
        agent = AssistantAgent("a", model_client=client(max_tokens=8))
        result = await agent.run(task="Hi")
        assert len(result.messages) == 2

    asyncio.run(run())


main()
