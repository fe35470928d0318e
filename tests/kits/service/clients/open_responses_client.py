"""python open_responses_client.py URL: the scenarios of Open Responses' compliance suite.

Answers and stream events are read with the models that the package ``openresponses-types`` generates from the
specification. The suite's scenarios: https://www.openresponses.org/compliance. Its scenario with an image is
left out, since models with images are not served.
"""

from __future__ import annotations

import functools
import json
import operator
import sys
import urllib.request
from typing import Any

import openresponses_types as spec
from checks import check, main
from pydantic import TypeAdapter

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Paris", "Rome"]}},
        "required": ["place"],
    },
}
EVENTS = [
    value
    for name, value in vars(spec).items()
    if name.startswith("Response") and name.endswith("StreamingEvent") and isinstance(value, type)
]
ANY_EVENT: TypeAdapter[Any] = TypeAdapter(functools.reduce(operator.or_, EVENTS))


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


def post(**body: Any) -> Any:
    """Return the open answer to a request."""
    data = json.dumps({"model": "toy", "max_output_tokens": 400, "temperature": 0, **body}).encode()
    request = urllib.request.Request(  # noqa: S310 -- our own URL
        f"{sys.argv[1]}/v1/responses", data, {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)  # noqa: S310


def whole(**body: Any) -> Any:
    """Return a response that follows the specification and has an output."""
    with post(**body) as answer:
        found = spec.ResponseResource.model_validate_json(answer.read(), strict=False)
    assert found.output
    assert found.status in ("completed", "incomplete")  # the toy model may not end its answer
    return found


def events(**body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which follows the specification."""
    with post(**body, stream=True) as answer:
        lines = [line.decode().strip() for line in answer]
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for one in found:
        assert ANY_EVENT.validate_python(one).type == one["type"]
    final = spec.ResponseResource.model_validate(found[-1]["response"])
    assert found[-1]["type"] == f"response.{final.status}"
    return found


@check
def basic_text_response() -> None:
    found = whole(input=[say("Say hello in exactly 3 words.")])
    assert found.output[0].type == "message"


@check
def streaming_response() -> None:
    assert events(input=[say("Count from 1 to 5.")])


@check
def system_prompt() -> None:
    whole(input=[say("You are a pirate.", "system"), say("Say hello.")])


@check
def tool_calling() -> None:
    asked = [say("How is the weather in Rome?")]
    found = whole(input=asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert found.output[0].type == "function_call"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    two = [TOOL, {**TOOL, "name": "b"}]
    found = whole(input=asked, tools=two, tool_choice=allowed, parallel_tool_calls=False)
    assert found.output[0].name == "b"


@check
def tool_calling_streaming() -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    found = events(input=[say("How is the weather in Rome?")], **asked)
    kinds = [one["type"] for one in found]
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    items = {one["type"] for one in found if one.get("item", {}).get("type") == "function_call"}
    assert items == {"response.output_item.added", "response.output_item.done"}


@check
def multi_turn() -> None:
    whole(input=[say("My name is Alice."), say("Hello Alice!", "assistant"), say("What is my name?")])


main()
