"""Wire messages and the service's own, both ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from carryall.errors import RequestError
from carryall.proto import carryall_pb2 as pb
from carryall.runtime.service.grpc_messages import from_request, to_response
from carryall.runtime.service.messages import Conversation, Delta, GenerationRequest, Usage
from carryall.runtime.types.outputs import Logprob, ToolCall
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput


def read(message: pb.GenerateRequest, **defaults: Any) -> GenerationRequest:
    return from_request(message, defaults)


def test_every_field_on_the_wire_is_a_sampling_option() -> None:
    fields = {field.name for field in pb.SamplingOptions.DESCRIPTOR.fields} - {"others"}
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
    options = pb.SamplingOptions(temperature=0, logprobs=0, skip_special_tokens=False, seed=0)
    params = read(pb.GenerateRequest(text="x", sampling=options)).params
    assert params == SamplingParams(temperature=0, logprobs=0, skip_special_tokens=False, seed=0)


def test_no_limit_is_written_as_zero() -> None:
    assert read(pb.GenerateRequest(text="", sampling={"max_tokens": 0})).params.max_tokens is None


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
    sampling = pb.SamplingOptions(
        logit_bias={3: -2.0},
        allowed_token_ids=[3, 4],
        bad_words=[pb.BadWord(text="no"), pb.BadWord(token_ids={"ids": [1, 2]})],
    )
    params = read(pb.GenerateRequest(text="x", sampling=sampling)).params
    assert (params.logit_bias, params.allowed_token_ids) == ({3: -2.0}, (3, 4))
    assert params.bad_words == ("no", (1, 2))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (pb.StructuredOutput(json_schema="{}"), StructuredOutput(json_schema="{}")),
        (pb.StructuredOutput(json_object=True), StructuredOutput(json_object=True)),
        (pb.StructuredOutput(regex="a+"), StructuredOutput(regex="a+")),
        (pb.StructuredOutput(grammar="start: x"), StructuredOutput(grammar="start: x")),
        (pb.StructuredOutput(choice={"texts": ["a", "b"]}), StructuredOutput(choice=("a", "b"))),
    ],
)
def test_structured_output(form: pb.StructuredOutput, expected: StructuredOutput) -> None:
    message = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(structured_output=form))
    assert read(message).params.structured_output == expected


def test_chat() -> None:
    request = read(pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "Hi"}]}))
    assert request.prompt == Conversation([{"role": "user", "content": "Hi"}])
    assert request.request_id is None
    assert request.params.max_tokens is None  # an answer has no limit unless one is given


def test_tools_and_their_calls() -> None:
    call = pb.ToolCall(id="c", name="now", arguments='{"zone": 1}')
    messages = [
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="12:00", tool_call_id="c"),
    ]
    request = read(pb.GenerateRequest(chat={"messages": messages, "tools": ['{"type": "function"}']}))
    function = {"name": "now", "arguments": {"zone": 1}}
    assert request.prompt == Conversation(
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "12:00", "tool_call_id": "c"},
        ],
        [{"type": "function"}],
    )
    delta = Delta(request_id="r", index=1, reasoning="hm", tool_calls=[ToolCall("c", "now", '{"zone": 1}')])
    message = to_response(delta, 0)
    assert (message.index, message.reasoning_delta, list(message.tool_calls)) == (1, "hm", [call])


def test_log_probabilities_of_the_prompt() -> None:
    own, best = Logprob(9, -3.0, 4, "!"), Logprob(2, -0.1, 1, "?")
    delta = Delta(request_id="r", index=0, prompt_logprobs=[None, {9: own, 2: best}])
    (entry,) = to_response(delta, 0).prompt_logprobs
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
            "temperature must be a number of at least 0, not nan",
        ),
        (pb.GenerateRequest(text="x", sampling={"seed": 2**64 - 1}), "seed must be an integer of at least 0"),
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
        (pb.GenerateRequest(chat={"tools": ["{"]}), "are not JSON"),
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
    message = to_response(delta, top_logprobs=1)
    assert message.logprobs[0].chosen == pb.Logprob(token_id=9, logprob=-3.0, rank=4, text="!")
    assert [entry.token_id for entry in message.logprobs[0].top] == [2]
    assert (message.finish_reason, message.stop_token_id) == (pb.FINISH_REASON_STOP, 9)
    assert message.usage == pb.Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1)


def test_an_unfinished_delta_has_neither_reason_nor_usage() -> None:
    message = to_response(Delta(request_id="r", index=0, text="a"), top_logprobs=0)
    assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert message.WhichOneof("stop_reason") is None
    assert not message.HasField("usage")
    stopped = to_response(Delta(request_id="r", index=0, finish_reason="stop", stop_reason="\n"), 0)
    assert stopped.stop_string == "\n"
