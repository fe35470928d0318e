"""``/v1/chat/completions``: read request bodies and write response bodies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .....errors import RequestError
from ...core.messages import Choice, Conversation, Generation, GenerationRequest
from ...core.tool_choice import calls_schema, read_calls
from .reading import COMMON, Json, bool_field, generation_request, objects_field, read_json, read_options
from .stream_options import StreamOptions, take_stream_options
from .writing import call_json, chat_logprobs, response

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
        raise RequestError(f"'chat_template_kwargs' must be an object, not {variables!r}")
    if "reasoning_effort" in options:
        variables = {"reasoning_effort": options.pop("reasoning_effort"), **variables}
    tools = objects_field("tools", options.pop("tools", []))
    parallel = bool_field("parallel_tool_calls", options.pop("parallel_tool_calls", True))
    choice, only = _tool_choice(options.pop("tool_choice", "auto"))
    continues = bool_field("continue_final_message", options.pop("continue_final_message", False))
    if bool_field("add_generation_prompt", options.pop("add_generation_prompt", not continues)) == continues:
        raise RequestError(
            "'continue_final_message' needs 'add_generation_prompt': false, which is not supported without it"
        )
    turns = [read_turn(message) for message in messages]
    if choice != "required":
        wanted = tools if choice == "auto" else []
        return Conversation(turns, wanted, variables, parallel_calls=parallel, continues=continues)
    if continues:
        raise RequestError("a forced 'tool_choice' and 'continue_final_message' exclude each other; omit one")
    if options.get("structured_output") is not None:
        raise RequestError("a forced 'tool_choice' and 'response_format' exclude each other; omit one")
    options["structured_output"] = {"json_schema": calls_schema(tools, only, parallel=parallel)}
    # Thinking is disabled because the grammar allows tool calls only.
    return Conversation(turns, tools, {"enable_thinking": False, **variables}, must_call=True)


def _tool_choice(given: Any) -> tuple[str, str | None]:
    """Return ``auto``, ``none`` or ``required``, and the name of the required function or None."""
    match given:
        case "auto" | "none" | "required":
            return given, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
    raise RequestError(
        "'tool_choice' must be 'auto', 'none', 'required' or "
        f'{{"type": "function", "function": {{"name": ...}}}}, not {given!r}'
    )


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise RequestError(f"content of type '{kind}' is not supported, only text")
    raise RequestError("each part of 'content' must be an object with the strings 'type' and 'text'")


def read_turn(message: Any) -> Json:
    """Return a message for chat templates: content is one string, tool call arguments are objects.

    Raises:
        RequestError: the role is missing, or the content is not text.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "".join(map(_part_text, content))
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with the strings 'role' and 'content'")
    # Chat templates use the older name of this role.
    role = "system" if message["role"] == "developer" else message["role"]
    turn = {**message, "role": role, "content": content}
    if calls:
        turn["tool_calls"] = [_past_call(call) for call in objects_field("tool_calls", calls)]
    return turn


def _past_call(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("each of 'tool_calls' must have a 'function' with a string 'name'")
    arguments = read_json(function.get("arguments", {}), f"the arguments of tool call '{function['name']}'")
    return {**call, "function": {**function, "arguments": arguments}}


def chat_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Return the response to a body."""
    choices = []
    for given in result.choices:
        choice = understood(request, given)
        choices.append(
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.token_ids, choice.logprobs, request.params.logprobs),
                "finish_reason": finish_reason(choice.finish_reason, bool(choice.tool_calls)),
            }
        )
    return response("chatcmpl", "chat.completion", result, model, choices)


def understood(request: GenerationRequest, choice: Choice) -> Choice:
    """Return the choice with forced tool calls parsed, and with at most 1 call if parallel calls are off."""
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        return choice
    if prompt.must_call:
        return dataclasses.replace(choice, text="", tool_calls=read_calls(choice.text))
    if not prompt.parallel_calls:
        return dataclasses.replace(choice, tool_calls=choice.tool_calls[:1])
    return choice


def finish_reason(reason: str, calls: bool) -> str:
    """Return OpenAI's name for the reason why an answer ended."""
    return "tool_calls" if calls and reason == "stop" else reason


def _message(choice: Choice) -> Json:
    """Return the message of a choice. ``reasoning_content`` is the name in DeepSeek's API and vLLM."""
    message: Json = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [call_json(call) for call in choice.tool_calls]
    return message
