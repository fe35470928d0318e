"""python pydantic_ai_client.py URL: agents of Pydantic AI over OpenAI's chat."""

from __future__ import annotations

from app_checks import KEY, MODEL, URL, City, is_city
from checks import check, main
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
SETTINGS = {"max_tokens": 300, "temperature": 0.0}


@check
def text() -> None:
    assert isinstance(Agent(model, model_settings={"max_tokens": 8}).run_sync("Hi").output, str)


@check
def structured_by_a_schema() -> None:
    agent = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS, retries=3)
    assert is_city(agent.run_sync("Hi").output)


@check
def structured_by_a_call() -> None:
    """The default: the answer is a call of a tool that the client demands."""
    agent = Agent(model, output_type=City, model_settings=SETTINGS, retries=3)
    assert is_city(agent.run_sync("Hi").output)


@check
def streamed() -> None:
    import asyncio

    async def run() -> str:
        async with Agent(model, model_settings={"max_tokens": 8}).run_stream("Hi") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert isinstance(asyncio.run(run()), str)


main()
