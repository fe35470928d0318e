"""OpenAI bodies: what they mean, what is refused, what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from carryall.errors import RequestError
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.core.messages import Delta, Generation, GenerationRequest, Usage
from carryall.runtime.service.http.openai.chat import chat_request
from carryall.runtime.service.http.openai.completions import completion_request
from carryall.runtime.service.http.openai.endpoints import ENDPOINTS
from carryall.runtime.types.outputs import Logprob, ToolCall
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput

TOOLS = [{"type": "function", "function": {"name": "now"}}]
TURNS = [{"role": "user", "content": "Hi"}]


def call(arguments: Any) -> dict[str, Any]:
    """An assistant's message with a tool call."""
    function = {"name": "now", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def test_completion_options_are_sampling_params() -> None:
    body = {
        "prompt": "x",
        "max_tokens": 3,
        "temperature": 0,
        "stop": ["a", "b"],
        "top_k": 5,
        "logprobs": 2,
        "seed": 7,
    }
    request = completion_request(
        {**body, "model": "any", "user": "me", "n": 1, "stream": False, "priority": -2, "timeout": 2.5}
    )
    assert request.params == SamplingParams(
        max_tokens=3, temperature=0, stop=("a", "b"), top_k=5, logprobs=2, seed=7
    )
    assert (request.prompt, request.priority) == ("x", -2)
    assert (request.tenant, request.timeout) == ("me", 2.5)


@pytest.mark.parametrize(
    ("prompt", "expected"), [([1, 2], [1, 2]), ([[1, 2]], [1, 2]), (["text"], "text"), ("", "")]
)
def test_prompts_may_be_text_or_tokens(prompt: Any, expected: Any) -> None:
    assert completion_request({"prompt": prompt}).prompt == expected


def turns_of(request: GenerationRequest) -> list[dict[str, Any]]:
    assert isinstance(request.prompt, Conversation)
    return request.prompt.turns()


def test_null_means_the_default() -> None:
    assert completion_request({"prompt": "x", "stop": None, "temperature": None}).params == SamplingParams()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams(max_tokens=None)),
        ({"max_tokens": 4}, SamplingParams(max_tokens=4)),
        ({"max_tokens": 4, "max_completion_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"logprobs": True, "top_logprobs": 2}, SamplingParams(max_tokens=None, logprobs=2)),
        ({"logprobs": True}, SamplingParams(max_tokens=None, logprobs=0)),
        ({"logprobs": False}, SamplingParams(max_tokens=None)),
    ],
)
def test_chat_options(options: dict[str, Any], expected: SamplingParams) -> None:
    request = chat_request({"messages": TURNS, **options})
    assert request.params == expected
    assert turns_of(request) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
            StructuredOutput(json_schema={"type": "array"}),
        ),
    ],
)
def test_response_format(response_format: dict[str, Any], expected: StructuredOutput | None) -> None:
    request = chat_request({"messages": TURNS, "response_format": response_format})
    assert request.params.structured_output == expected


SCHEMA = {"type": "array"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=SCHEMA)),
        ({"guided_json": '{"type": "array"}'}, StructuredOutput(json_schema='{"type": "array"}')),
        ({"guided_json_object": True}, StructuredOutput(json_object=True)),
        ({"guided_regex": "[0-9]+"}, StructuredOutput(regex="[0-9]+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"guided_grammar": "root ::= [a-z]"}, StructuredOutput(grammar="root ::= [a-z]")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"structured_outputs": {"choice": ["a"], "regex": None, "disable_fallback": True}},
         StructuredOutput(choice=("a",))),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, StructuredOutput(choice=("a",))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [
    lambda fields: chat_request({"messages": TURNS, **fields}),
    lambda fields: completion_request({"prompt": "x", **fields}),
])  # fmt: skip
def test_vllms_fields_of_structured_output(
    read: Callable[[dict[str, Any]], GenerationRequest],
    fields: dict[str, Any],
    expected: StructuredOutput | None,
) -> None:
    assert read(fields).params.structured_output == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "an answer has one form"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "an answer has one form"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "an answer has one form"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag' is not supported"),
        ({"structured_outputs": []}, "'structured_outputs' must be an object"),
        ({"guided_choice": "ab"}, "choice must be a list"),
        ({"guided_regex": 3}, "cannot be 3"),
        ({"guided_json": 5}, "cannot be 5"),
    ],
)
def test_contradicting_or_invalid_forms_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat_request({"messages": TURNS, **fields})


@pytest.mark.parametrize("response_format", ["json", {}, {"type": "json_schema"}])
def test_other_response_formats_are_refused(response_format: object) -> None:
    with pytest.raises(RequestError, match="'response_format' must have"):
        chat_request({"messages": TURNS, "response_format": response_format})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": ", you"}]
    request = chat_request({"messages": [{"role": "user", "content": parts, "name": "Ann"}]})
    assert turns_of(request) == [{"role": "user", "content": "Hello, you", "name": "Ann"}]


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        ("/v1/completions", {}, "'prompt' must be"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "1 line for each prompt"),
        ("/v1/completions", {"prompt": [1, True]}, "'prompt' must be"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "'echo': True is not supported, only False"),
        ("/v1/completions", {"prompt": "x", "cache_salt": 3}, "'cache_salt' must be a string"),
        ("/v1/completions", {"prompt": "x", "user": 3}, "'user' must be a string"),
        ("/v1/completions", {"prompt": "x", "timeout": "2 s"}, "'timeout' must be a number"),
        ("/v1/completions", {"prompt": "x", "timeout": 0}, "must be a positive number of seconds"),
        ("/v1/completions", {"prompt": "x", "timeout": float("nan")}, "must be a positive number of seconds"),
        ("/v1/completions", {"prompt": "x", "logits_processors": ["os.exit"]}, "must be a list of functions"),
        ("/v1/completions", {"prompt": "x", "temprature": 1}, "did you mean 'temperature'"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": "5"},
            "max_tokens must be an integer of at",
        ),
        ("/v1/completions", {"prompt": "x", "priority": "high"}, "'priority' must be an integer"),
        ("/v1/chat/completions", {"messages": []}, "at least 1 message"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "each message must be"),
        ("/v1/chat/completions", {"messages": ["Hi"]}, "each message must be"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1]}]}, "each part of 'content'"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "an image must have an 'image_url'",
        ),
        ("/v1/chat/completions", {"messages": TURNS, "tools": ["now"]}, "'tools' must be a list of objects"),
        ("/v1/chat/completions", {"messages": TURNS, "tool_choice": "required"}, "tools are: none"),
        ("/v1/chat/completions", {"messages": TURNS, "tool_choice": "maybe"}, "'tool_choice' must be"),
        ("/v1/chat/completions", {"messages": TURNS, "stream": True}, "'stream': True is not supported"),
        ("/v1/chat/completions", {"messages": TURNS, "chat_template_kwargs": 1}, "must be an object"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "must be one of system,"),
        (
            "/v1/chat/completions",
            {"messages": [{**call("{}"), "tool_calls": [{}]}]},
            "must have a 'function'",
        ),
        ("/v1/chat/completions", {"messages": TURNS, "logprobs": 3}, "'logprobs' must be true or false"),
    ],
)
def test_unsupported_requests_are_refused(url: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ENDPOINTS[url].request(body)


def test_tools_and_past_calls_reach_the_template_as_objects() -> None:
    answer = {"role": "tool", "content": "12:00", "tool_call_id": "c"}
    body = {"messages": [*TURNS, call('{"zone": 1}'), answer], "tools": TOOLS, "cache_salt": "tenant"}
    request = chat_request({**body, "chat_template_kwargs": {"enable_thinking": False}})
    past = {**call({"zone": 1}), "content": ""}
    assert turns_of(request) == [*TURNS, past, answer]
    assert isinstance(request.prompt, Conversation)
    assert (request.prompt.tools, request.prompt.variables) == (TOOLS, {"enable_thinking": False})
    assert request.cache_salt == "tenant"
    untold = chat_request({**body, "tool_choice": "none"})
    assert turns_of(untold) == [*TURNS, past, answer]
    assert isinstance(untold.prompt, Conversation)
    assert not untold.prompt.tools


def generation(logprobs: list[dict[int, Logprob]], **options: Any) -> Generation:
    choice: dict[str, Any] = {
        "request_id": "r1",
        "index": 0,
        "text": "ab!",
        "token_ids": [7, 9][: len(logprobs) or 2],
        "logprobs": logprobs,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=3, reasoning_tokens=1)
    return Generation(request_id="r1", choices=[Delta(**{**choice, **options})], usage=usage)


CANDIDATES = [
    {7: Logprob(7, -0.5, 1, "ab")},
    {9: Logprob(9, -3.0, 4, "!"), 2: Logprob(2, -0.1, 1, "?")},  # the chosen one is not among the best
]


def test_tokens_that_are_parts_of_a_character_have_their_own_bytes() -> None:
    parts = [{1: Logprob(1, -0.5, 1, "\ufffd", (0xC3,)), 2: Logprob(2, -1.0, 2, "\ufffd", (0xE2,))}]
    result = generation(parts, token_ids=[1])
    chat = ENDPOINTS["/v1/chat/completions"]
    asked = chat.request(
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    )
    (entry,) = chat.response(asked, result, "m")["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in (entry, *entry["top_logprobs"])] == [[0xC3], [0xC3], [0xE2]]
    request = GenerationRequest(prompt="x", params=SamplingParams(logprobs=2))
    body = ENDPOINTS["/v1/completions"].response(request, result, "m")
    found = body["choices"][0]["logprobs"]
    assert found["tokens"] == [r"bytes:\xc3"]
    assert found["top_logprobs"] == [{r"bytes:\xc3": -0.5, r"bytes:\xe2": -1.0}]


def test_completion_response() -> None:
    request = GenerationRequest(prompt="x", params=SamplingParams(logprobs=1))
    body = ENDPOINTS["/v1/completions"].response(request, generation(CANDIDATES), "m")
    assert body["object"] == "text_completion"
    assert (body["id"], body["model"]) == ("cmpl-r1", "m")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "ab!",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["ab", "!"],
                "token_logprobs": [-0.5, -3.0],
                "top_logprobs": [{"ab": -0.5}, {"?": -0.1, "!": -3.0}],
                "text_offset": [0, 2],
            },
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_chat_response_lists_only_the_most_likely_beside_the_chosen() -> None:
    request = GenerationRequest(prompt=Conversation([]), params=SamplingParams(logprobs=1))
    body = ENDPOINTS["/v1/chat/completions"].response(request, generation(CANDIDATES), "m")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab!"}
    best = {"token": "?", "logprob": -0.1, "bytes": [63]}
    assert choice["logprobs"]["content"][1] == {
        "token": "!", "logprob": -3.0, "bytes": [33], "top_logprobs": [best]
    }  # fmt: skip


def test_no_logprobs_unless_asked_for() -> None:
    for endpoint in ENDPOINTS.values():
        body = endpoint.response(GenerationRequest(prompt="x"), generation([]), "m")
        assert body["choices"][0]["logprobs"] is None


def test_reasoning_and_tool_calls_have_openai_s_shape() -> None:
    calls = [ToolCall("c1", "now", "{}"), ToolCall("c2", "f", '{"x": 1}')]
    result = generation([], text="", reasoning="hm", tool_calls=calls, finish_reason="stop")
    request = GenerationRequest(prompt=Conversation([]))
    body = ENDPOINTS["/v1/chat/completions"].response(request, result, "m")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert message["tool_calls"][1] == {
        "id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}
    }  # fmt: skip


def test_bodies_are_what_openai_s_own_client_reads() -> None:
    """With its models made strict, a missing or wrong field is an error."""
    types = pytest.importorskip("openai.types")
    from openai.types.chat import ChatCompletion

    request = GenerationRequest(prompt=Conversation([]), params=SamplingParams(logprobs=1))
    result = generation(CANDIDATES, tool_calls=[ToolCall("c1", "now", "{}")], finish_reason="stop")
    body = ENDPOINTS["/v1/chat/completions"].response(request, result, "m")
    answer = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].model_dump()["function"] == {"name": "now", "arguments": "{}"}
    body = ENDPOINTS["/v1/completions"].response(request, generation(CANDIDATES), "m")
    assert types.Completion.model_validate(body, strict=True).choices[0].text == "ab!"


def test_log_probabilities_of_the_prompt() -> None:
    result = dataclasses.replace(generation([]), prompt_logprobs=[None, {7: Logprob(7, -0.5, 1, "ab")}])
    body = ENDPOINTS["/v1/completions"].response(GenerationRequest(prompt="x"), result, "m")
    assert body["prompt_logprobs"] == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "ab"}}]
