"""python dspy_client.py URL: DSPy's language models over OpenAI's chat.

Its JSON adapter asks for a schema only of models that its own list has, so that a local one gets JSON mode.
"""

from __future__ import annotations

import dspy
from app_checks import KEY, MODEL, URL, City
from checks import check, main

lm = dspy.LM(
    f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False, num_retries=0, max_tokens=300, temperature=0.0
)


@check
def text() -> None:
    assert isinstance(lm("Hi", max_tokens=8)[0], (str, dict))


@check
def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "City", "schema": City.model_json_schema()}}
    assert City.model_validate_json(lm("Hi", response_format=schema)[0])


@check
def a_tool_is_called() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}}}  # fmt: skip
    answer = lm("Hi", tools=[tool], tool_choice="required")[0]
    assert answer["tool_calls"][0].function.name == "weather"


@check
def messages() -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert len(lm(messages=turns, max_tokens=8, n=2)) == 2


main()
