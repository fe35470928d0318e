"""``/v1/chat/completions``: read request bodies and write response bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .....errors import RequestError
from .....options import shown
from ....types.outputs import ToolCall
from ...core.answer_parts import understood
from ...core.chat import (
    Conversation,
    ToolOrigin,
    converse,
    custom_input,
    read_message,
    read_tool_choice,
    read_tools,
    thinking,
)
from ...core.messages import Delta, Generation, GenerationRequest
from .reading import COMMON, Json, bool_field, generation_request, read_continues, read_options
from .stream_options import StreamOptions, take_stream_options
from .writing import chat_logprobs, response

KNOWN = COMMON | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "max_completion_tokens"),
    *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
}


def chat_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the request of a body without ``stream``.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    request, stream = read_chat(body)
    if stream.stream:
        raise RequestError("'stream': True is not supported here, only False")
    return request


def read_chat(body: Mapping[str, Any]) -> tuple[GenerationRequest, StreamOptions]:
    """Return the request and the stream options of a body.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    options = read_options(body, {})
    stream = take_stream_options(options)
    messages = options.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise RequestError("'messages' must be a list of at least 1 message")
    wanted, top = options.pop("logprobs", False), options.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RequestError("'logprobs' must be true or false; 'top_logprobs' sets the number")
    if wanted:
        options["logprobs"] = top
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    options.setdefault("max_tokens", None)  # unlike completions, chat has no default limit
    return generation_request(_conversation(messages, options), options), stream


def _conversation(messages: list[Any], options: Json) -> Conversation:
    """Return the conversation of a body. The options that it uses are removed from ``options``."""
    variables = options.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RequestError(f"'chat_template_kwargs' must be an object, not {shown(variables)}")
    if "reasoning_effort" in options:
        variables = {**thinking(options.pop("reasoning_effort"), options), **variables}
    tools = read_tools(options.pop("tools", []))
    parallel = bool_field("parallel_tool_calls", options.pop("parallel_tool_calls", True))
    choice = read_tool_choice(options.pop("tool_choice", None), tools.left_out)
    return converse(
        [read_message(message) for message in messages],
        options,
        tools=tools,
        choice=choice,
        variables=variables,
        parallel=parallel,
        continues=read_continues(options),
    )


def chat_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Return the response to a body."""
    origins = request.prompt.origins if isinstance(request.prompt, Conversation) else {}
    choices = []
    for given in result.choices:
        choice = understood(request, given)
        choices.append(
            {
                "index": choice.index,
                "message": _message(choice, origins),
                "logprobs": chat_logprobs(choice.token_ids, choice.logprobs, request.params.logprobs),
                "finish_reason": finish_reason(choice.finish_reason, bool(choice.tool_calls)),
                **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
            }
        )
    body = response("chatcmpl", "chat.completion", result, model, choices)
    if request.return_token_ids:
        body["prompt_token_ids"] = list(result.prompt_token_ids)
    return body


def finish_reason(reason: str | None, calls: bool) -> str | None:
    """Return OpenAI's name for the reason why an answer ended."""
    return "tool_calls" if calls and reason == "stop" else reason


def _message(choice: Delta, origins: Mapping[str, ToolOrigin]) -> Json:
    """Return the message of a choice. ``reasoning_content`` is the name in DeepSeek's API and vLLM."""
    message: Json = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call_json(call, origins) for call in choice.tool_calls]
    return message


def _call_json(call: ToolCall, origins: Mapping[str, ToolOrigin]) -> Json:
    """Return a call as JSON. Streams have no form for custom tools, so that they show the function."""
    if call.name in origins and origins[call.name].custom:
        custom = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
