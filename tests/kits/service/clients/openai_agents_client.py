"""python openai_agents_client.py URL: OpenAI's Agents SDK over chat and responses."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from app_checks import KEY, MODEL, URL, City, is_city
from checks import check, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
MODELS = [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]
SEEN: list[bool] = []


@function_tool  # type: ignore[untyped-decorator]
def weather(context: RunContextWrapper[None], sunny: bool) -> str:
    """Tell the weather."""
    SEEN.append(sunny)
    return "noted"


@check
def a_tool_is_called() -> None:
    for model in MODELS:
        agent = Agent(
            name="a",
            model=model,
            tools=[weather],
            tool_use_behavior=StopAtTools(stop_at_tool_names=["weather"]),
            model_settings=ModelSettings(tool_choice="weather", max_tokens=300, temperature=0.0),
        )
        before = len(SEEN)
        result = Runner.run_sync(agent, "Hi")
        assert result.final_output == "noted", result
        assert len(SEEN) > before


@check
def structured() -> None:
    for model in MODELS:
        settings = ModelSettings(max_tokens=300, temperature=0.0)
        agent = Agent(name="a", model=model, output_type=City, model_settings=settings)
        assert is_city(Runner.run_sync(agent, "Hi").final_output)


@check
def text_and_stream() -> None:
    """Of chat: the SDK takes a response that a limit cut for a failure, and the test's model ends none."""

    async def run() -> None:
        model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
        agent = Agent(name="a", model=model, model_settings=ModelSettings(max_tokens=8))
        assert isinstance((await Runner.run(agent, "Hi")).final_output, str)
        assert len([event async for event in Runner.run_streamed(agent, "Hi").stream_events()]) > 1

    asyncio.run(run())


@check
def structured_response_streamed() -> None:
    async def run() -> None:
        model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
        settings = ModelSettings(max_tokens=300, temperature=0.0)
        agent = Agent(name="a", model=model, output_type=City, model_settings=settings)
        result = Runner.run_streamed(agent, "Hi")
        assert len([event async for event in result.stream_events()]) > 1
        assert is_city(result.final_output)

    asyncio.run(run())


main()
