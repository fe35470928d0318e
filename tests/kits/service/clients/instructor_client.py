"""python instructor_client.py URL: instructor's modes over OpenAI's chat."""

from __future__ import annotations

from typing import Any

import instructor
from app_checks import KEY, MODEL, URL, City, is_city
from checks import check, main
from openai import OpenAI

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def ask(mode: instructor.Mode) -> Any:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL, response_model=City, messages=MESSAGES, max_tokens=300, temperature=0, max_retries=2
    )


@check
def tools() -> None:
    assert is_city(ask(instructor.Mode.TOOLS))


@check
def tools_strict() -> None:
    assert is_city(ask(instructor.Mode.TOOLS_STRICT))


@check
def json_schema() -> None:
    assert is_city(ask(instructor.Mode.JSON_SCHEMA))


@check
def partial() -> None:
    client = instructor.from_openai(
        OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS
    )
    pieces = list(
        client.chat.completions.create_partial(
            model=MODEL, response_model=City, messages=MESSAGES, max_tokens=300, temperature=0
        )
    )
    assert pieces[-1].name


main()
