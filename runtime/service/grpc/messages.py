"""Convert messages of `carryall.v1` to generation requests, and deltas to messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ....errors import RequestError
from ....options import shown
from ....proto import generation_pb2 as pb
from ....proto import sampling_pb2, tasks_pb2
from ...types.outputs import FinishReason, Logprob
from ...types.sampling_params import SamplingParams
from ..core.chat import (
    Conversation,
    FunctionCall,
    FunctionResult,
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    ToolChoice,
    Tools,
    converse,
    read_arguments,
    read_role,
    read_tools,
)
from ..core.messages import Delta, GenerationRequest, by_rank, checked_timeout

FINISH_REASONS: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}

_MODES: Mapping[int, Literal["auto", "none", "required"]] = {
    pb.TOOL_CHOICE_MODE_NONE: "none",
    pb.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def generate_request(message: pb.GenerateRequest, defaults: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a Generate message; ``defaults`` are the model's default sampling options.

    Raises:
        RequestError: the message has no prompt, or a sampling option is out of range.
    """
    options = {**defaults, **_options(message.sampling)}
    match message.WhichOneof("prompt"):
        case "text":
            return _request(message, message.text, options)
        case "token_ids":
            return _request(message, list(message.token_ids.ids), options)
        case _:
            raise RequestError("the request has no prompt; set one of text, token_ids")


def chat_request(message: pb.ChatRequest, defaults: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a Chat message; see ``generate_request``.

    Raises:
        RequestError: a JSON field is invalid, a sampling option is out of range, or tool_choice names an
            unknown function.
    """
    # A chat answer has no default length limit, since chat models end their answers.
    options: dict[str, Any] = {"max_tokens": None, **defaults, **_options(message.sampling)}
    tools = _tools(message.tools)
    talk = converse(
        [_message(turn) for turn in message.messages],
        options,
        tools=tools,
        choice=_tool_choice(message.tool_choice),
        variables=_object("template_variables_json", message.template_variables_json),
    )
    return _request(message, talk, options)


def _tool_choice(choice: pb.ToolChoice) -> ToolChoice:
    if choice.WhichOneof("choice") == "function_name":
        return ToolChoice("required", frozenset([choice.function_name]), single=True)
    return ToolChoice(_MODES.get(choice.mode, "auto"))


def conversation(message: tasks_pb2.Conversation) -> Conversation:
    """Return the conversation of a message.

    Raises:
        RequestError: a JSON field is invalid.
    """
    return converse(
        [_message(turn) for turn in message.messages],
        {},
        tools=_tools(message.tools),
        variables=_object("template_variables_json", message.template_variables_json),
    )


def _request(
    message: pb.GenerateRequest | pb.ChatRequest,
    prompt: str | list[int] | Conversation,
    options: Mapping[str, Any],
) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        params=SamplingParams.from_dict(options),
        request_id=message.request_id or None,
        priority=message.priority,
        cache_salt=message.cache_salt or None,
        tenant=message.tenant or None,
        timeout=checked_timeout(message.timeout_seconds) if message.HasField("timeout_seconds") else None,
    )


def _message(message: pb.ChatMessage) -> Message:
    """Return a message.

    Raises:
        RequestError: its role or its content is not valid.
    """
    role, content = read_role(message.role), _content(message)
    if role == "tool":
        return Message(role, (FunctionResult(content or (Text(""),), message.tool_call_id),))
    parts: list[Part] = [Reasoning(message.reasoning)] if message.reasoning else []
    calls = [FunctionCall(call.name, read_arguments(call.arguments), call.id) for call in message.tool_calls]
    return Message(role, (*parts, *content, *calls))


def _content(message: pb.ChatMessage) -> tuple[Text | Image, ...]:
    """Return the texts and pictures of a message.

    Raises:
        RequestError: there are both ``content`` and ``parts``, or a part is empty.
    """
    if not message.parts:
        return (Text(message.content),) if message.content else ()
    if message.content:
        raise RequestError("a message has both 'content' and 'parts'; set one of them")
    parts: list[Text | Image] = []
    for number, part in enumerate(message.parts, 1):
        match part.WhichOneof("part"):
            case "text":
                parts.append(Text(part.text))
            case "image" if part.image:
                parts.append(Image(part.image))
            case _:
                raise RequestError(f"part {number} of a message is empty; set its 'text' or its 'image'")
    return tuple(parts)


def _tools(tools: Iterable[pb.Tool]) -> Tools:
    return read_tools([_tool(tool) for tool in tools])


def _tool(tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _object(
        f"parameters_json_schema of tool '{tool.name}'",
        tool.parameters_json_schema or '{"type": "object", "properties": {}}',
    )
    return {"type": "function", "function": function}


def _object(what: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(f"{what}: not JSON: {error}") from error
    except RecursionError:
        raise RequestError(f"{what}: nested too deeply") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what}: must be a JSON object, not {shown(text[:80])}")
    return value


def _options(message: sampling_pb2.SamplingOptions) -> dict[str, Any]:
    """Return the options that are set, by their names in SamplingParams."""
    options = {field.name: value for field, value in message.ListFields()}
    others = options.pop("others", {})
    try:
        options |= {name: json.loads(value) for name, value in others.items()}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a value in 'others' of the sampling options is not JSON: {error}") from error
    if options.get("max_tokens") == 0:
        options["max_tokens"] = None
    if message.bad_words:
        options["bad_words"] = [_bad_word(word) for word in message.bad_words]
    if message.HasField("watermark"):
        options["watermark"] = _watermark(message.watermark)
    if message.HasField("structured_output"):
        options["structured_output"] = _structured_output(message.structured_output)
    return options


def _structured_output(message: sampling_pb2.StructuredOutput) -> dict[str, Any]:
    form = message.WhichOneof("form")
    if form == "choice":
        return {form: message.choice.texts}
    return {form: getattr(message, form)} if form else {}


def _watermark(message: sampling_pb2.Watermark) -> dict[str, Any]:
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    return {**given, "keys": tuple(message.keys)}


def _bad_word(word: sampling_pb2.BadWord) -> str | list[int]:
    return word.text if word.WhichOneof("word") == "text" else list(word.token_ids.ids)


def generate_response(delta: Delta, model: str, top_logprobs: int) -> pb.GenerateResponse:
    """Return the message of a delta, with the ``top_logprobs`` best candidates of each token."""
    message = pb.GenerateResponse(text_delta=delta.text)
    _write(message, delta, model, top_logprobs)
    message.finish_reason = _finish_reason(delta)
    return message


class ChatWriter:
    """Converts the deltas of one chat request to messages, and numbers the tool calls of each answer.

    Args:
        model: the name of the model that answers.
        request: the request.
    """

    def __init__(self, model: str, request: GenerationRequest) -> None:
        self._model, self._top_logprobs = model, request.params.logprobs or 0
        self._calls = Counter[int]()

    def response(self, delta: Delta) -> pb.ChatResponse:
        """Return the message of the next delta."""
        message = pb.ChatResponse(reasoning_delta=delta.reasoning)
        _write(message, delta, self._model, self._top_logprobs)
        message.content_delta = delta.text
        for call in delta.tool_calls:
            if call.id:
                self._calls[delta.index] += 1
            number = self._calls[delta.index] - 1
            message.tool_calls.add(index=number, id=call.id, name=call.name, arguments_delta=call.arguments)
        called = delta.finish_reason == "stop" and self._calls[delta.index]
        message.finish_reason = pb.FINISH_REASON_TOOL_CALLS if called else _finish_reason(delta)
        return message


def _finish_reason(delta: Delta) -> pb.FinishReason:
    late = delta.finish_reason == "cancelled" and delta.stop_reason == "deadline"
    return pb.FINISH_REASON_TIMEOUT if late else FINISH_REASONS[delta.finish_reason]


def _write(
    message: pb.GenerateResponse | pb.ChatResponse, delta: Delta, model: str, top_logprobs: int
) -> None:
    """Fill the fields that both kinds of responses have."""
    message.request_id, message.model, message.index = delta.request_id, model, delta.index
    message.token_ids.extend(delta.token_ids)
    message.logprobs.extend(
        _token_logprobs(token, candidates, top_logprobs)
        for token, candidates in zip(delta.token_ids, delta.logprobs, strict=False)
    )
    # The first candidate of each entry is the prompt's token.
    message.prompt_logprobs.extend(
        _token_logprobs(next(iter(entry)), entry, len(entry)) for entry in delta.prompt_logprobs if entry
    )
    if isinstance(delta.stop_reason, int):
        message.stop_token_id = delta.stop_reason
    elif delta.stop_reason is not None and delta.finish_reason == "stop":
        message.stop_string = delta.stop_reason
    if delta.usage is not None:
        message.usage.prompt_tokens = delta.usage.prompt_tokens
        message.usage.completion_tokens = delta.usage.completion_tokens
        message.usage.cached_tokens = delta.usage.cached_tokens


def _token_logprobs(token: int, candidates: Mapping[int, Logprob], top: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=_logprob(candidates[token]), top=[_logprob(entry) for entry in by_rank(candidates, top)]
    )


def _logprob(entry: Logprob) -> pb.Logprob:
    return pb.Logprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, text=entry.text)
