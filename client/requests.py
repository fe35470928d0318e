"""Convert Python values to messages of `carryall.v1`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import RequestError
from ..proto import generation_pb2, sampling_pb2, tasks_pb2
from .options import Options, Scheduling

Message = Mapping[str, Any] | generation_pb2.ChatMessage
Prompt = str | Sequence[int]
EmbedPrompt = Prompt | Mapping[str, bytes]  # the latter is a picture: {"image": the bytes of its file}

_SCHEDULING = Scheduling.__optional_keys__
_MODES = {
    "auto": generation_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_MODE_NONE,
    "required": generation_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


def generate_request(model: str, prompt: Prompt, options: Options) -> generation_pb2.GenerateRequest:
    """Return a request to continue a text or token ids.

    Raises:
        RequestError: an option is unknown or of the wrong type.
    """
    request = generation_pb2.GenerateRequest(model=model, **_common(options))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def chat_request(
    model: str,
    messages: Iterable[Message],
    tools: Iterable[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    template_variables: Mapping[str, Any] | None,
    options: Options,
) -> generation_pb2.ChatRequest:
    """Return a request for the next turn of a conversation, given in the form of OpenAI's API.

    Raises:
        RequestError: a message, a function or an option is invalid.
    """
    request = generation_pb2.ChatRequest(model=model, **_common(options))
    request.messages.extend(chat_message(message) for message in messages)
    request.tools.extend(tool_message(tool) for tool in tools)
    if isinstance(tool_choice, str):
        if tool_choice not in _MODES:
            raise RequestError(
                f"tool_choice must be one of {', '.join(_MODES)} or name a function, not {tool_choice!r}"
            )
        request.tool_choice.mode = _MODES[tool_choice]
    elif tool_choice is not None:
        request.tool_choice.function_name = tool_choice["function"]["name"]
    if template_variables:
        request.template_variables_json = json.dumps(template_variables)
    return request


def conversation(messages: Iterable[Message], tools: Iterable[Mapping[str, Any]]) -> tasks_pb2.Conversation:
    """Return a conversation to tokenize."""
    return tasks_pb2.Conversation(
        messages=[chat_message(message) for message in messages], tools=[tool_message(tool) for tool in tools]
    )


def chat_message(message: Message) -> generation_pb2.ChatMessage:
    """Return one message of a conversation.

    Raises:
        RequestError: the message has no role, or an unknown key.
    """
    if isinstance(message, generation_pb2.ChatMessage):
        return message
    known = {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
    if "role" not in message or not message.keys() <= known:
        raise RequestError(
            f"a message must have a role and only the keys {', '.join(sorted(known))}, not {sorted(message)}"
        )
    calls = [
        generation_pb2.ToolCall(
            id=call.get("id", ""),
            name=call["function"]["name"],
            arguments=_json(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    return generation_pb2.ChatMessage(
        role=message["role"],
        content=content if isinstance(content, str) else "",
        parts=() if isinstance(content, str) else map(_content_part, content),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id") or "",
        reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
    )


def _content_part(part: Mapping[str, Any]) -> generation_pb2.ContentPart:
    """Return a part of a content: a text, or the bytes of a picture.

    Raises:
        RequestError: it is of another kind.
    """
    match part:
        case {"type": "text", "text": str(text)}:
            return generation_pb2.ContentPart(text=text)
        case {"type": "image", "image": bytes(image)}:
            return generation_pb2.ContentPart(image=image)
    raise RequestError(
        "a part of a content must be {'type': 'text', 'text': ...} or {'type': 'image', 'image': bytes of a "
        f"file}}, not {sorted(part)}"
    )


def tool_message(tool: Mapping[str, Any]) -> generation_pb2.Tool:
    """Return a tool, given as in OpenAI's API or as the function alone."""
    function = tool.get("function", tool)
    return generation_pb2.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters_json_schema=_json(function["parameters"]) if "parameters" in function else "",
    )


def embed_input(prompt: EmbedPrompt) -> tasks_pb2.EmbedInput:
    """Return a text, token ids or a picture to embed.

    Raises:
        RequestError: a mapping is no picture.
    """
    if isinstance(prompt, Mapping):
        image = prompt.get("image")
        if set(prompt) != {"image"} or not isinstance(image, bytes):
            raise RequestError("a picture to embed must be {'image': the bytes of its file}")
        return tasks_pb2.EmbedInput(image=image)
    if isinstance(prompt, str):
        return tasks_pb2.EmbedInput(text=prompt)
    return tasks_pb2.EmbedInput(token_ids=sampling_pb2.TokenIds(ids=prompt))


def _common(options: Options) -> dict[str, Any]:
    given: dict[str, Any] = dict(options)
    scheduling = {name: given.pop(name) for name in list(given) if name in _SCHEDULING}
    return {**scheduling, "sampling": _sampling(given)}


def _sampling(options: Mapping[str, Any]) -> sampling_pb2.SamplingOptions:
    fields = dict(options)
    if fields.get("max_tokens", 0) is None:
        fields["max_tokens"] = 0
    if "stop" in fields and isinstance(fields["stop"], str):
        fields["stop"] = [fields["stop"]]
    if "bad_words" in fields:
        fields["bad_words"] = [_bad_word(word) for word in fields["bad_words"]]
    if fields.get("structured_output") is not None:
        fields["structured_output"] = _structured_output(fields["structured_output"])
    if isinstance(watermark := fields.get("watermark"), bool):
        fields["watermark"] = {} if watermark else None  # green lists with the usual values
    known = sampling_pb2.SamplingOptions.DESCRIPTOR.fields_by_name
    try:
        others = {name: json.dumps(fields.pop(name)) for name in list(fields) if name not in known}
        return sampling_pb2.SamplingOptions(**fields, others=others)
    except (TypeError, ValueError) as error:
        raise RequestError(f"a sampling option is of the wrong type: {error}") from error


def _bad_word(word: str | Sequence[int]) -> sampling_pb2.BadWord:
    if isinstance(word, str):
        return sampling_pb2.BadWord(text=word)
    return sampling_pb2.BadWord(token_ids=sampling_pb2.TokenIds(ids=word))


def _structured_output(form: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Callable[[Any], Any]] = {
        "json_schema": _json,
        "choice": lambda texts: sampling_pb2.Choice(texts=texts),
    }
    return {name: read[name](value) if name in read else value for name, value in form.items()}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
