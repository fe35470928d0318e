"""Wire messages and the service's own, both ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from carryall.errors import RequestError
from carryall.proto import generation_pb2 as pb
from carryall.proto import sampling_pb2
from carryall.runtime.service.core.chat import Conversation
from carryall.runtime.service.core.messages import Delta, GenerationRequest, Usage
from carryall.runtime.service.grpc.messages import (
    ChatWriter,
    chat_request,
    generate_request,
    generate_response,
)
from carryall.runtime.types.outputs import Logprob, ToolCall
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput
from carryall.runtime.types.watermark import Watermark


def read(message: pb.GenerateRequest, **defaults: Any) -> GenerationRequest:
    return generate_request(message, defaults)


def test_every_field_on_the_wire_is_a_sampling_option() -> None:
    fields = {field.name for field in sampling_pb2.SamplingOptions.DESCRIPTOR.fields} - {"others"}
    assert fields <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_options_without_a_field_travel_by_name() -> None:
    options = {"extra_args": '{"shape": [1, 2]}', "dry_base": "2", "logprobs": "3"}
    params = read(pb.GenerateRequest(text="x", sampling={"others": options})).params
    assert params == SamplingParams(extra_args={"shape": [1, 2]}, dry_base=2.0, logprobs=3)


def test_options_left_out_have_their_defaults() -> None:
    assert read(pb.GenerateRequest(text="x")).params == SamplingParams()


def test_the_models_own_options_come_before_the_defaults() -> None:
    message = pb.GenerateRequest(text="x", sampling={"top_k": 3})
    assert read(message, top_k=9, top_p=0.5).params == SamplingParams(top_k=3, top_p=0.5)


def test_options_at_zero_are_not_left_out() -> None:
    options = sampling_pb2.SamplingOptions(temperature=0, logprobs=0, skip_special_tokens=False, seed=0)
    params = read(pb.GenerateRequest(text="x", sampling=options)).params
    assert params == SamplingParams(temperature=0, logprobs=0, skip_special_tokens=False, seed=0)


def test_zero_means_no_limit() -> None:
    assert read(pb.GenerateRequest(text="", sampling={"max_tokens": 0})).params.max_tokens is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Watermark()),
        ({"ratio": 0.25, "bias": 3.5, "key": 2**62}, Watermark(ratio=0.25, bias=3.5, key=2**62)),
        ({"kind": "synthid", "keys": [3, 2**63 - 1], "ngram_length": 4, "table_seed": 0},
         Watermark(kind="synthid", keys=(3, 2**63 - 1), ngram_length=4)),
    ],
)  # fmt: skip
def test_watermarks(given: dict[str, Any], expected: Watermark) -> None:
    params = read(pb.GenerateRequest(text="x", sampling={"watermark": given})).params
    assert params.watermark == expected


def test_each_field_of_a_watermark_is_on_the_wire() -> None:
    fields = {field.name for field in sampling_pb2.Watermark.DESCRIPTOR.fields}
    assert fields == {field.name for field in dataclasses.fields(Watermark)}


def test_guards_of_length() -> None:
    params = read(
        pb.GenerateRequest(text="x", sampling={"repetition_guard": 4, "reasoning_budget": 0})
    ).params
    assert (params.repetition_guard, params.reasoning_budget) == (4, 0)


def test_lists_and_identity() -> None:
    request = read(
        pb.GenerateRequest(
            token_ids={"ids": [3, 4]},
            request_id="r",
            priority=-1,
            cache_salt="salt",
            tenant="tenant",
            timeout_seconds=1.5,
            sampling={"stop": ["a"], "stop_token_ids": [5]},
        )
    )
    assert (request.prompt, request.request_id, request.priority) == ([3, 4], "r", -1)
    assert (request.cache_salt, request.tenant, request.timeout) == ("salt", "tenant", 1.5)
    with pytest.raises(RequestError, match="positive number of seconds"):
        read(pb.GenerateRequest(text="", timeout_seconds=0.0))
    alone = read(pb.GenerateRequest(text=""))
    assert (alone.tenant, alone.timeout) == (None, None)
    assert (request.params.stop, request.params.stop_token_ids) == (("a",), (5,))


def test_bans_and_biases() -> None:
    sampling = sampling_pb2.SamplingOptions(
        logit_bias={3: -2.0},
        allowed_token_ids=[3, 4],
        bad_words=[sampling_pb2.BadWord(text="no"), sampling_pb2.BadWord(token_ids={"ids": [1, 2]})],
    )
    params = read(pb.GenerateRequest(text="x", sampling=sampling)).params
    assert (params.logit_bias, params.allowed_token_ids) == ({3: -2.0}, (3, 4))
    assert params.bad_words == ("no", (1, 2))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (sampling_pb2.StructuredOutput(json_schema="{}"), StructuredOutput(json_schema="{}")),
        (sampling_pb2.StructuredOutput(json_object=True), StructuredOutput(json_object=True)),
        (sampling_pb2.StructuredOutput(regex="a+"), StructuredOutput(regex="a+")),
        (sampling_pb2.StructuredOutput(grammar="start: x"), StructuredOutput(grammar="start: x")),
        (sampling_pb2.StructuredOutput(choice={"texts": ["a", "b"]}), StructuredOutput(choice=("a", "b"))),
    ],
)
def test_structured_output(form: sampling_pb2.StructuredOutput, expected: StructuredOutput) -> None:
    message = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingOptions(structured_output=form))
    assert read(message).params.structured_output == expected


def read_chat(message: pb.ChatRequest, **defaults: Any) -> GenerationRequest:
    return chat_request(message, defaults)


def test_chat() -> None:
    message = pb.ChatRequest(
        messages=[{"role": "user", "content": "Hi"}], template_variables_json='{"enable_thinking": false}'
    )
    request = read_chat(message)
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.turns() == [{"role": "user", "content": "Hi"}]
    assert request.prompt.variables == {"enable_thinking": False}
    assert request.request_id is None
    assert request.params.max_tokens is None  # an answer has no limit unless one is given
    assert read_chat(message, max_tokens=7).params.max_tokens == 7


CALL = pb.ToolCall(id="c", name="now", arguments='{"zone": 1}')
TOOL = pb.Tool(name="now", description="The time.", parameters_json_schema='{"type": "object"}')


def test_tools_and_their_calls() -> None:
    messages = [
        pb.ChatMessage(role="assistant", tool_calls=[CALL], reasoning="hm"),
        pb.ChatMessage(role="tool", content="12:00", tool_call_id="c"),
    ]
    request = read_chat(pb.ChatRequest(messages=messages, tools=[TOOL, pb.Tool(name="stop")]))
    function = {"name": "now", "arguments": {"zone": 1}}
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.turns() == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "c"},
    ]
    assert [tool["function"] for tool in request.prompt.tools] == [
        {"name": "now", "description": "The time.", "parameters": {"type": "object"}},
        {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    ]


def test_tools_are_not_told_if_none_may_be_called() -> None:
    choice = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
    request = read_chat(pb.ChatRequest(tools=[TOOL], tool_choice=choice))
    assert isinstance(request.prompt, Conversation)
    assert not request.prompt.tools


REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


@pytest.mark.parametrize("choice", [REQUIRED, pb.ToolChoice(function_name="now")])
def test_a_demanded_call_is_held_by_a_grammar(choice: pb.ToolChoice) -> None:
    request = read_chat(pb.ChatRequest(tools=[TOOL, pb.Tool(name="stop")], tool_choice=choice))
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.called == (("now",) if choice.function_name else ("now", "stop"))
    assert [tool["function"]["name"] for tool in request.prompt.tools] == ["now", "stop"]
    assert request.params.structured_output is None


def test_calls_are_numbered_within_their_answer() -> None:
    writer = ChatWriter("toy", GenerationRequest(prompt=Conversation([])))
    calls = [ToolCall("c", "now", "{}"), ToolCall("d", "now", '{"a": 1}')]
    written = [
        writer.response(Delta(request_id="r", index=1, reasoning="hm", tool_calls=calls[:1])),
        writer.response(Delta(request_id="r", index=0, tool_calls=calls[:1])),
        writer.response(Delta(request_id="r", index=1, tool_calls=calls[1:], finish_reason="stop")),
        writer.response(Delta(request_id="r", index=2, text="no", finish_reason="stop")),
    ]
    found = [(m.index, call.index, call.id) for m in written for call in m.tool_calls]
    assert found == [(1, 0, "c"), (0, 0, "c"), (1, 1, "d")]
    assert written[0].reasoning_delta == "hm"
    assert written[2].tool_calls[0].arguments_delta == '{"a": 1}'
    assert [m.finish_reason for m in written[2:]] == [pb.FINISH_REASON_TOOL_CALLS, pb.FINISH_REASON_STOP]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.ChatRequest(template_variables_json="{"), "template_variables_json: not JSON"),
        (pb.ChatRequest(template_variables_json="[]"), "must be a JSON object"),
        (pb.ChatRequest(template_variables_json='{"a":' * 9999), "template_variables_json: n"),
        (
            pb.ChatRequest(tools=[{"name": "f", "parameters_json_schema": "x"}]),
            "schema of tool 'f': not JSON",
        ),
        (
            pb.ChatRequest(messages=[{"role": "user", "content": "a", "parts": [{"text": "b"}]}]),
            "both 'content' and 'parts'",
        ),
        (pb.ChatRequest(messages=[{"role": "user", "parts": [{"text": "b"}, {}]}]), "part 2 of a message"),
        (pb.ChatRequest(messages=[{"role": "user", "parts": [{"image": b""}]}]), "part 1 of a message"),
        (pb.ChatRequest(messages=[{"role": "robot"}]), "'role' of a message must be one of system"),
        (pb.ChatRequest(tool_choice={"function_name": "f"}), "the request's tools are: none"),
        (pb.ChatRequest(tools=[TOOL], tool_choice={"function_name": "f"}), "the request's tools are: now"),
    ],
)
def test_bad_conversations_say_why(message: pb.ChatRequest, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_chat(message)


def test_log_probabilities_of_the_prompt() -> None:
    own, best = Logprob(9, -3.0, 4, "!"), Logprob(2, -0.1, 1, "?")
    delta = Delta(request_id="r", index=0, prompt_logprobs=[None, {9: own, 2: best}])
    (entry,) = generate_response(delta, "toy", 0).prompt_logprobs
    assert (entry.chosen.token_id, [top.token_id for top in entry.top]) == (9, [2])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.GenerateRequest(), "no prompt"),
        (
            pb.GenerateRequest(text="x", sampling={"top_p": 1.5}),
            "top_p must be a number of more than 0 and at most 1, not 1.5",
        ),
        (
            pb.GenerateRequest(text="x", sampling={"temperature": float("nan")}),
            r"temperature must be a number of at least 0 and at most 1e\+06, not nan",
        ),
        (pb.GenerateRequest(text="x", sampling={"seed": 2**64 - 1}), "seed must be an integer of at least 0"),
        (
            pb.GenerateRequest(text="x", sampling={"watermark": {"ratio": 1.5}}),
            "ratio of a watermark must be",
        ),
        (pb.GenerateRequest(text="x", sampling={"watermark": {"kind": "synthid"}}), "1 to 64 keys"),
        (pb.GenerateRequest(text="x", sampling={"others": {"tempo": "1"}}), "no option 'tempo'"),
        (pb.GenerateRequest(text="x", sampling={"others": {"top_k": "one"}}), "is not JSON"),
        (pb.GenerateRequest(text="x", sampling={"others": {"top_k": "[" * 10**5}}), "is not JSON"),
        (
            pb.GenerateRequest(text="x", sampling={"others": {"logits_processors": "[1]"}}),
            "list of functions",
        ),
        (pb.GenerateRequest(text="x", sampling={"stop": [""]}), "stop strings must not be empty"),
        (pb.GenerateRequest(text="x", sampling={"bad_words": [{}]}), "bad_words must not be empty"),
        (pb.GenerateRequest(text="x", sampling={"structured_output": {}}), "needs one of json_schema"),
    ],
)
def test_bad_requests_say_why(message: pb.GenerateRequest, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read(message)


def test_a_delta_on_the_wire() -> None:
    chosen, best = Logprob(9, -3.0, 4, "!"), Logprob(2, -0.1, 1, "?")
    delta = Delta(
        request_id="r",
        index=0,
        text="!",
        token_ids=[9],
        logprobs=[{9: chosen, 2: best}],
        finish_reason="stop",
        stop_reason=9,
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1),
    )
    message = generate_response(delta, "toy", 1)
    assert message.logprobs[0].chosen == pb.Logprob(token_id=9, logprob=-3.0, rank=4, text="!")
    assert [entry.token_id for entry in message.logprobs[0].top] == [2]
    assert (message.finish_reason, message.stop_token_id) == (pb.FINISH_REASON_STOP, 9)
    assert message.usage == pb.Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1)


def test_an_unfinished_delta_has_neither_reason_nor_usage() -> None:
    message = generate_response(Delta(request_id="r", index=0, text="a"), "toy", 0)
    assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert message.WhichOneof("stop_reason") is None
    assert not message.HasField("usage")
    stopped = generate_response(
        Delta(request_id="r", index=0, finish_reason="stop", stop_reason="\n"), "toy", 0
    )
    assert stopped.stop_string == "\n"
