"""OpenAI's JSON shapes for completions and chat completions, and what they mean here.

Bodies follow https://platform.openai.com/docs/api-reference, with vLLM's further sampling options
(`top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `min_tokens`, ...).
An option that would have to be ignored to be accepted is an error.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .....errors import RequestError
from ....types.outputs import Logprob
from ....types.sampling_params import SamplingParams
from ...core.messages import (
    Choice,
    Conversation,
    Generation,
    GenerationRequest,
    Prompt,
    Usage,
    by_rank,
    checked_timeout,
)

Json = dict[str, Any]

# Describe the caller or the bill, not the generation. One model is loaded, whatever `model` says.
IGNORED = ("metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store")
# Accepted with the one value that asks for what is done anyway.
ONLY: dict[str, Any] = {
    "echo": False,
    "parallel_tool_calls": True,
    "stream": False,
    "stream_options": None,
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one url's bodies are read and answered."""

    request: Callable[[Mapping[str, Any]], GenerationRequest]
    response: Callable[[GenerationRequest, Generation, str], Json]  # str: the model's name


def completion_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Read a body of /v1/completions.

    Raises:
        RequestError: something in it is wrong or cannot be done.
    """
    options = _options(body)
    prompt = options.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list of one prompt
    if not isinstance(prompt, str) and not _is_token_ids(prompt):
        raise RequestError(
            "'prompt' must be one text or one list of token ids; put several prompts in lines of their own"
        )
    return _request(prompt, options)


def chat_request(body: Mapping[str, Any]) -> GenerationRequest:
    """Read a body of /v1/chat/completions.

    Raises:
        RequestError: something in it is wrong or cannot be done.
    """
    options = _options(body)
    messages = options.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise RequestError("'messages' must be a list of at least one message")
    wanted, top = options.pop("logprobs", False), options.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RequestError("'logprobs' must be true or false; 'top_logprobs' says how many")
    if wanted:
        options["logprobs"] = top
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    options.setdefault("max_tokens", None)  # unlike completions, chat has no default limit
    tools = _objects("tools", options.pop("tools", []))
    choice = options.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(f"'tool_choice' may be 'auto' or 'none', not {choice!r}")
    variables = options.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RequestError(f"'chat_template_kwargs' must be an object, not {variables!r}")
    turns = [_turn(message) for message in messages]
    return _request(Conversation(turns, tools if choice == "auto" else [], variables), options)


def _options(body: Mapping[str, Any]) -> Json:
    """Return what is left to be read: null means the default, and some options have one possible value."""
    options = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in ONLY.items():
        given = options.pop(name, value)
        if given != value:
            raise RequestError(f"'{name}': {given!r} is not supported, only {value!r}")
    if "response_format" in options:
        options["structured_output"] = _structured_output(options.pop("response_format"))
    return options


def _structured_output(response_format: Any) -> Json | None:
    """Read ``response_format``: text, json_object, or json_schema with its ``schema``."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": schema}
    raise RequestError(
        f"'response_format' cannot be {response_format!r}; its type is text, json_object or json_schema"
    )


def _request(prompt: Prompt, options: Json) -> GenerationRequest:
    priority = options.pop("priority", 0)
    if not isinstance(priority, int):
        raise RequestError(f"'priority' must be a whole number, not {priority!r}")
    salt, tenant = (_text(name, options.pop(name, None)) for name in ("cache_salt", "user"))
    timeout = options.pop("timeout", None)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
        raise RequestError(f"'timeout' must be a number of seconds, not {timeout!r}")
    return GenerationRequest(
        prompt=prompt,
        params=SamplingParams.from_dict(options),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        timeout=None if timeout is None else checked_timeout(timeout),
    )


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"'{name}' must be a text, not {value!r}")
    return value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def _objects(name: str, value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{name}' must be a list of objects")
    return value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _turn(message: Any) -> Json:
    """Return one message as templates want it: its content one text, arguments of tool calls as objects."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a text 'role' and a text 'content'")
    turn = {**message, "content": content}
    if calls:
        turn["tool_calls"] = [_past_call(call) for call in _objects("tool_calls", calls)]
    return turn


def _past_call(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("each of 'tool_calls' must have a 'function' with a text 'name'")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise RequestError(
            f"the arguments of tool call '{function['name']}' are not JSON: {error}"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def completion_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Answer a body of /v1/completions."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        for choice in result.choices
    ]
    return _response("cmpl", "text_completion", result, model, choices)


def chat_response(request: GenerationRequest, result: Generation, model: str) -> Json:
    """Answer a body of /v1/chat/completions."""
    choices = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": _chat_logprobs(choice, request.params.logprobs),
            "finish_reason": "tool_calls" if _calls_tools(choice) else choice.finish_reason,
        }
        for choice in result.choices
    ]
    return _response("chatcmpl", "chat.completion", result, model, choices)


def _message(choice: Choice) -> Json:
    """The answer; ``reasoning_content`` as DeepSeek's API and vLLM name it."""
    message: Json = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def _calls_tools(choice: Choice) -> bool:
    return bool(choice.tool_calls) and choice.finish_reason == "stop"


def _response(prefix: str, kind: str, result: Generation, model: str, choices: list[Json]) -> Json:
    body = {
        "id": f"{prefix}-{result.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(result.usage),
    }
    if result.prompt_logprobs:
        body["prompt_logprobs"] = [
            None if entry is None else {str(token): _prompt_entry(one) for token, one in entry.items()}
            for entry in result.prompt_logprobs
        ]
    return body


def _prompt_entry(entry: Logprob) -> Json:
    """As vLLM writes them."""
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _completion_logprobs(result: Choice) -> Json | None:
    if not result.logprobs:
        return None
    chosen = [candidates[token] for candidates, token in zip(result.logprobs, result.token_ids, strict=True)]
    lengths = [len(entry.text) for entry in chosen]
    return {
        "tokens": [entry.text for entry in chosen],
        "token_logprobs": [entry.logprob for entry in chosen],
        "top_logprobs": [{e.text: e.logprob for e in by_rank(candidates)} for candidates in result.logprobs],
        "text_offset": list(itertools.accumulate(lengths, initial=0))[:-1],
    }


def _chat_logprobs(result: Choice, wanted: int | None) -> Json | None:
    if wanted is None:
        return None
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return {
        "content": [
            {**_entry(candidates[token]), "top_logprobs": [_entry(e) for e in by_rank(candidates, wanted)]}
            for token, candidates in pairs
        ]
    }


def _entry(entry: Logprob) -> Json:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.text.encode())}


ENDPOINTS = {
    "/v1/completions": Endpoint(completion_request, completion_response),
    "/v1/chat/completions": Endpoint(chat_request, chat_response),
}
