"""What ``/v1/responses`` reads from a body."""

from __future__ import annotations

from typing import Any

import pytest

from carryall.errors import RequestError
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.http.openai.responses import read_response

TOOLS = [{"type": "function", "name": name} for name in ("a", "b", "c")]


def read(**body: Any) -> Conversation:
    prompt = read_response({"input": "Hi", "tools": TOOLS, **body}, {}, []).request.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def allowed(*names: str, **mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "tools": [{"type": "function", "name": name} for name in names], **mode}


@pytest.mark.parametrize("mode", [{}, {"mode": "auto"}, {"mode": "required"}])
def test_only_the_allowed_tools_reach_the_model(mode: dict[str, str]) -> None:
    found = read(tool_choice=allowed("c", "a", **mode))
    assert [tool["function"]["name"] for tool in found.tools] == ["a", "c"]
    assert bool(found.called) == (mode == {"mode": "required"})


@pytest.mark.parametrize("choice", [allowed(), allowed("a", "z"), {"type": "allowed_tools"}])
def test_allowed_tools_that_do_not_exist_are_errors(choice: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"tool_choice\.tools"):
        read(tool_choice=choice)


def test_the_response_repeats_tools_with_all_fields_of_the_specification() -> None:
    echo = read_response({"input": "Hi", "tools": TOOLS[:1]}, {}, []).echo
    assert echo["tools"] == [{**TOOLS[0], "description": None, "parameters": None, "strict": None}]
