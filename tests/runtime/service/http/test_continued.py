"""A last message of the assistant is the beginning of the answer, in every API that has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from http_serving import http_serving
from null_llm import null_llm

from carryall.runtime.types.sampling_params import SamplingParams

TALK: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
FLAGS = {"continue_final_message": True, "add_generation_prompt": False}
CALLS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/chat/completions": (
        {"max_tokens": 9, "temperature": 0, **FLAGS},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "/v1/messages": ({"max_tokens": 9, "temperature": 0}, lambda answer: answer["content"][0]["text"]),
    "/api/chat": (
        {"options": {"num_predict": 9, "temperature": 0}, "stream": False},
        lambda answer: answer["message"]["content"],
    ),
}


@pytest.mark.parametrize("path", CALLS)
def test_the_answer_continues_the_last_message(path: str) -> None:
    options, text_of = CALLS[path]

    async def scenario() -> None:
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        template += "{% if add_generation_prompt %}[assistant]{% endif %}"
        async with null_llm(template=template) as llm, http_serving(llm) as served:
            prompt = llm.encode("[user]Hi;[assistant]The answer is", add_special_tokens=False)
            *_, last = [
                output async for output in llm.generate(prompt, SamplingParams(max_tokens=9, temperature=0))
            ]
            answer = await served.post(path, model="toy", messages=TALK, **options)
            assert answer.status_code == 200, answer.text
            assert text_of(answer.json()) == last.outputs[0].text

    asyncio.run(scenario())


TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "needs"),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "not supported without it"),
        ("/v1/chat/completions", {**FLAGS, "messages": TALK[:1]}, "only a last message of the assistant"),
        (
            "/v1/chat/completions",
            {**FLAGS, "tools": [FUNCTION], "tool_choice": "required"},
            "exclude each other",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "tools": [TOOL], "tool_choice": {"type": "any"}},
            "exclude each other",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(path: str, body: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            answer = await served.post(path, **{"model": "toy", "messages": TALK, **body})
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), (
                answer.text
            )

    asyncio.run(scenario())
