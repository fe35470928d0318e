"""python smolagents_client.py URL: agents of smolagents over OpenAI's chat."""

from __future__ import annotations

from typing import Any

from app_checks import KEY, MODEL, URL
from checks import check, main
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


def model(**options: Any) -> OpenAIServerModel:
    return OpenAIServerModel(MODEL, api_base=URL, api_key=KEY, temperature=0.0, **options)


class Weather(Tool):  # type: ignore[misc]
    """A tool without a choice: the model of the test is random."""

    name = "weather"
    description = "Tells the weather."
    inputs = {"sunny": {"type": "boolean", "description": "Whether it is sunny."}}  # noqa: RUF012
    output_type = "string"
    seen: list[bool] = []  # noqa: RUF012

    def forward(self, sunny: bool) -> str:
        """Note the call."""
        self.seen.append(sunny)
        return "noted"


MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@check
def text() -> None:
    assert isinstance(model(max_tokens=8).generate(MESSAGES).content, str)


@check
def streamed() -> None:
    assert list(model(max_tokens=8).generate_stream(MESSAGES))


@check
def structured() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = model(max_tokens=200).generate(MESSAGES, response_format=form)
    assert '"n"' in str(answer.content)


@check
def an_agent_calls_tools() -> None:
    """The agent demands a call in each step; it ends by its own tool ``final_answer``."""
    agent = ToolCallingAgent(tools=[Weather()], model=model(max_tokens=300), max_steps=2, verbosity_level=0)
    assert agent.run("Hi") is not None
    assert Weather.seen or agent.memory.steps[-1]


main()
