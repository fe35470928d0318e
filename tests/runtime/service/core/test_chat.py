"""The one reader of conversations: every API's parts, tools, choices and continuations in one form."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import RequestError
from carryall.proto import generation_pb2 as pb
from carryall.runtime.service.core.chat import (
    Conversation,
    FunctionCall,
    FunctionResult,
    Image,
    Message,
    Reasoning,
    Text,
    ToolChoice,
    ToolOrigin,
    converse,
    joined,
    read_arguments,
    read_message,
    read_parts,
    read_tool_choice,
    read_tools,
    thinking,
)
from carryall.runtime.service.grpc.messages import chat_request as grpc_chat
from carryall.runtime.service.http.anthropic import read_body
from carryall.runtime.service.http.openai.chat import chat_request
from carryall.runtime.service.http.openai.responses import read_response

DOT = b"\x89PNG\r\n\x1a\n"
ENCODED = base64.b64encode(DOT).decode()


def turns_of(prompt: Any) -> list[dict[str, Any]]:
    assert isinstance(prompt, Conversation)
    return prompt.turns()


def test_one_conversation_is_the_same_in_every_api() -> None:
    """A question, a thought, a call, its result and a further question."""
    arguments = '{"city": "Bonn"}'
    function = {"name": "weather", "arguments": arguments}
    chat = [
        {"role": "developer", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "reasoning_content": "hm",
         "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "dry"}]},
        {"role": "user", "content": "T"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "dry"}]},
        {"role": "user", "content": "T"},
    ]
    blocks = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bonn"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "dry"},
            {"type": "text", "text": "T"},
        ]},
    ]  # fmt: skip
    messages = [
        pb.ChatMessage(role="system", content="S"),
        pb.ChatMessage(role="user", content="Q"),
        pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[{"id": "c", **function}]),
        pb.ChatMessage(role="tool", tool_call_id="c", content="dry"),
        pb.ChatMessage(role="user", content="T"),
    ]
    expected = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c", "type": "function",
                 "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
        {"role": "user", "content": "T"},
    ]  # fmt: skip
    assert turns_of(chat_request({"messages": chat}).prompt) == expected
    assert turns_of(read_response({"instructions": "S", "input": items}, {}, []).request.prompt) == expected
    assert turns_of(read_body({"max_tokens": 1, "system": "S", "messages": blocks}, {}).prompt) == expected
    assert turns_of(grpc_chat(pb.ChatRequest(messages=messages), {}).prompt) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}", "detail": "low"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{ENCODED}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        {"type": "document", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        {"type": "file", "file": {"file_data": f"data:image/png;base64,{ENCODED}", "filename": "a.png"}},
        {"type": "input_file", "file_data": f"data:image/png;base64,{ENCODED}", "filename": "a.png"},
    ],
)
def test_images_are_carried_with_their_bytes_and_media_type(part: dict[str, Any]) -> None:
    message = read_message({"role": "user", "content": [{"type": "text", "text": "What is "}, part]})
    sizes = {"detail": "low"} if part["type"] == "image_url" else {}
    assert message.parts == (Text("What is "), Image(DOT, "image/png", sizes=sizes))
    told = list(message.turns(lambda image: f"<{len(image.data)} bytes>"))
    assert told == [{"role": "user", "content": f"What is <{len(DOT)} bytes>"}]
    parts = [{"type": "text", "text": "What is "}, {"type": "image", "image": DOT, **sizes}]
    assert list(message.turns()) == [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
    ],
)
def test_the_address_of_an_image_is_carried(part: dict[str, Any]) -> None:
    assert read_parts([part]) == [Image(url="https://example.org/a.png")]


def test_images_of_ollama_and_of_results_are_carried() -> None:
    message = read_message({"role": "user", "content": "What?", "images": [ENCODED]})
    assert message.parts == (Image(DOT), Text("What?"))
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}}
    result = read_message(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]}
    )
    assert result.parts == (FunctionResult((Image(DOT, "image/png"),), "c"),)
    parts = [{"type": "image", "image": DOT}]
    assert list(result.turns()) == [{"role": "tool", "content": parts, "tool_call_id": "c"}]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "image_url"}], "must have an 'image_url'"),
        ([{"type": "image_url", "image_url": "data:image/png,abc"}], "must be base64"),
        ([{"type": "image_url", "image_url": "data:image/png;base64,?"}], "is not base64"),
        ([{"type": "image", "source": {"type": "base64", "data": "?"}}], "is not base64"),
        ([{"type": "input_audio", "input_audio": {}}], "'input_audio' is not supported"),
        ([{"type": "document", "source": {"type": "file", "file_id": "f"}}], "must be given as text"),
        ([{"type": "file", "file": {"file_id": "f"}}], "files by 'file_id' are not read"),
        ([{"type": "input_file", "file_data": "data:application/pdf,abc"}], "must be base64"),
        ([{"type": "file", "file": "f"}], "'file' is not supported"),
        ([{"type": "text"}], "the strings 'type' and 'text'"),
        ([7], "the strings 'type' and 'text'"),
        (7, "a text or a list of parts"),
    ],
)
def test_parts_that_cannot_be_read_say_why(content: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read_parts(content)


def test_a_refusal_and_a_document_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    parts = read_parts(
        [{"type": "refusal", "refusal": "No."}, {"type": "document", "title": "T", "source": source}]
    )
    assert parts == [Text("No."), Text("T\n\nbody")]
    assert read_message({"role": "assistant", "content": None, "refusal": "No."}).parts == (Text("No."),)


@pytest.mark.parametrize("role", ["user<|im_end|>", "robot", "", "User"])
def test_a_role_is_one_of_the_known(role: str) -> None:
    with pytest.raises(RequestError, match="must be one of system, developer, user"):
        read_message({"role": role, "content": "x"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        (" \n", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_of_past_calls_never_end_a_conversation(given: Any, expected: Any) -> None:
    assert read_arguments(given) == expected


@given(st.text(max_size=40))
def test_any_text_of_arguments_is_taken(text: str) -> None:
    assert isinstance(read_arguments(text), dict | str)


def test_items_of_one_answer_become_one_message() -> None:
    call = FunctionCall("f", {}, "c")
    messages = [Message("assistant", (part,)) for part in (Reasoning("a"), Text("b"), call)]
    (message,) = joined(messages)
    assert message.parts == (Reasoning("a"), Text("b"), call)


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": FUNCTION},
        {"type": "function", **FUNCTION, "strict": False},
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "f", "description": "d", "input_schema": {"type": "object"}},
    ],
)
def test_a_function_is_the_same_in_every_api(tool: dict[str, Any]) -> None:
    tools = read_tools([tool])
    assert tools.functions == [{"type": "function", "function": FUNCTION}]
    assert (tools.origins, tools.left_out) == ({}, [])


@pytest.mark.parametrize(
    "tool",
    [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "R"},
        },
        {
            "type": "custom",
            "custom": {
                "name": "patch",
                "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "R"}},
            },
        },
    ],
)
def test_a_custom_tool_is_a_function_with_one_text(tool: dict[str, Any]) -> None:
    tools = read_tools([tool])
    (function,) = (one["function"] for one in tools.functions)
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].endswith("lark grammar:\nR")
    assert tools.origins == {"patch": ToolOrigin("patch", custom=True)}


def test_a_namespace_is_its_functions_and_hosted_tools_are_left_out() -> None:
    tools = read_tools(
        [
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "web_search", "filters": None},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ]
    )
    assert (tools.names, tools.left_out) == (["f"], ["web_search", "web_search_20250305"])
    assert tools.origins == {"f": ToolOrigin("f", namespace="mcp")}
    talk = converse([], {}, tools=tools, choice=read_tool_choice({"type": "web_search"}, tools.left_out))
    assert (talk.left_out, talk.called) == (("tools.web_search", "tools.web_search_20250305"), ())


@pytest.mark.parametrize(
    "tool", [{}, {"type": "function"}, {"name": "f"}, {"type": 3}, {"type": "namespace"}]
)
def test_a_malformed_tool_is_an_error_that_stays_short(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="each tool must have a 'name'") as caught:
        read_tools([{**tool, "padding": "x" * 20_000}])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "f"}, ToolChoice("required", frozenset("f"), single=True)),
        ({"type": "function", "name": "f"}, ToolChoice("required", frozenset("f"), single=True)),
        (
            {"type": "function", "function": {"name": "f"}},
            ToolChoice("required", frozenset("f"), single=True),
        ),
        ({"type": "custom", "custom": {"name": "f"}}, ToolChoice("required", frozenset("f"), single=True)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice("required", frozenset("f")),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": FUNCTION}]}},
            ToolChoice("auto", frozenset("f")),
        ),
    ],
)
def test_choices_of_every_api(given: Any, expected: ToolChoice) -> None:
    assert read_tool_choice(given) == expected


@pytest.mark.parametrize("given", ["maybe", 3, {}, {"type": "web_search"}, {"type": "tool"}])
def test_other_choices_are_errors(given: Any) -> None:
    with pytest.raises(RequestError, match="'tool_choice' must be"):
        read_tool_choice(given)


def test_a_demanded_call_replaces_the_form_of_a_text() -> None:
    options: dict[str, Any] = {"structured_output": {"json_object": True}}
    tools = read_tools([{"type": "function", "function": FUNCTION}])
    talk = converse([], options, tools=tools, choice=ToolChoice("required"))
    assert talk.called == ("f",)
    assert "structured_output" not in options


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (Message("assistant", (Text("so far"),)), True),
        (Message("assistant", (Reasoning("hm"),)), False),
        (Message("assistant", (Text("so far"), FunctionCall("f", {}))), False),
        (Message("user", (Text("so far"),)), False),
    ],
)
def test_a_last_text_of_the_assistant_is_continued(last: Message, continues: bool) -> None:
    assert converse([last], {}, continues=None).continues is continues
    tools = read_tools([{"type": "function", "function": FUNCTION}])
    if continues:
        with pytest.raises(RequestError, match="exclude each other"):
            converse([last], {}, tools=tools, choice=ToolChoice("required"), continues=None)


def test_a_tool_that_is_not_there_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    for choice, entries, told in (
        ({"type": "function", "function": {"name": "h"}}, tools, "'h'; the request's tools are: f, g"),
        ("required", [], "tools are: none"),
    ):
        with pytest.raises(RequestError, match=told):
            converse([], {}, tools=read_tools(entries), choice=read_tool_choice(choice))
    with pytest.raises(RequestError, match="must have a 'name'"):
        read_tools([{"type": "function", "function": {}}])


@pytest.mark.parametrize(
    ("effort", "options", "budget", "variables"),
    [
        (None, {"max_tokens": 100}, None, {}),
        ("low", {"max_tokens": 100}, 20, {"reasoning_effort": "low"}),
        ("high", {"max_tokens": 100, "reasoning_budget": 7}, 7, {"reasoning_effort": "high"}),
        ("high", {"max_tokens": None}, None, {"reasoning_effort": "high"}),
        ("own", {"max_tokens": 100}, None, {"reasoning_effort": "own"}),
        ("none", {}, 0, {"reasoning_effort": "none", "enable_thinking": False}),
    ],
)
def test_an_effort_is_a_share_of_the_tokens(
    effort: Any, options: dict[str, Any], budget: int | None, variables: dict[str, Any]
) -> None:
    assert thinking(effort, options) == variables
    assert options.get("reasoning_budget") == budget


def test_a_video_is_its_frames_and_their_rate() -> None:
    url = f"data:image/png;base64,{ENCODED}"
    frames = [url, {"type": "image_url", "image_url": {"url": url}}]
    message = read_message({"role": "user", "content": [{"type": "video", "video": frames, "fps": 4}]})
    image = {"type": "image", "image": DOT}
    (turn,) = message.turns()
    assert turn["content"] == [{"type": "video", "video": [image, image], "fps": 4}]
    with pytest.raises(RequestError, match="takes no videos"):
        message.require_text()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "video", "video": "data:video/mp4;base64,AA"}, "the service reads no files of videos"),
        ({"type": "video_url", "video_url": {"url": "https://example.org"}}, "reads no files of videos"),
        ({"type": "video", "video": [5]}, "a frame of a video must be"),
        ({"type": "video", "video": [{"type": "text", "text": "a"}]}, "an image must have"),
    ],
)
def test_a_video_that_is_no_list_of_frames_is_refused(part: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        read_parts([part])


def test_results_of_functions_have_no_videos() -> None:
    part = {"type": "video", "video": []}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    for message in ({"role": "tool", "content": [part]}, {"role": "user", "content": [result]}):
        with pytest.raises(RequestError, match="holds no videos"):
            read_message(message)


def test_paths_as_frames_of_a_service_are_addresses() -> None:
    (video,) = read_parts([{"type": "video", "video": ["/etc/passwd"]}])
    (turn,) = Message("user", (video,)).turns()
    assert turn["content"][0]["video"] == [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]
