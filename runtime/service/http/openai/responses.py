"""``/v1/responses``: read request bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .....errors import RequestError
from .....options import shown
from .....records import dataclass
from ...core.chat import (
    FunctionCall,
    FunctionResult,
    Message,
    Part,
    Reasoning,
    Text,
    converse,
    joined,
    objects,
    read_arguments,
    read_parts,
    read_result,
    read_role,
    read_tool_choice,
    read_tools,
    thinking,
)
from ...core.messages import GenerationRequest
from .compaction import summary_messages
from .reading import (
    Json,
    bool_field,
    generation_request,
    structured_output,
    text_field,
)

KNOWN = frozenset(
    {"model", "input", "instructions", "previous_response_id", "store", "stream", "background", "metadata"}
    | {"temperature", "top_p", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "text"}
    | {"reasoning", "user", "truncation", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "watermark", "repetition_guard"}
    | {"stream_options", "top_k", "min_p", "seed", "stop", "ignore_eos", "priority", "timeout", "cache_salt"}
    | {"presence_penalty", "frequency_penalty", "include", "top_logprobs"}
)
_LOGPROBS = "message.output_text.logprobs"
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "user", "priority",
         "timeout", "cache_salt", "presence_penalty", "frequency_penalty", "prompt_cache_key",
         "prompt_cache_retention", "watermark", "repetition_guard")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseAsk:
    """The content of a request body.

    Args:
        request: the request for the engine.
        messages: without the instructions; a later response continues them.
        items: the input items.
        echo: the fields of the body that the response repeats.
        stream: whether to stream events; in the background also to keep them.
        store: whether to store the response.
        background: whether to return at once and generate in the background.
    """

    request: GenerationRequest
    messages: list[Message]
    items: list[Json]
    echo: Json
    stream: bool
    store: bool
    background: bool


def read_response(
    body: Mapping[str, Any], defaults: Mapping[str, Any], before: Sequence[Message]
) -> ResponseAsk:
    """Return the content of a body.

    Args:
        body: the request body.
        defaults: the model's default sampling options.
        before: the messages of the conversation to continue.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    options: Json = {"max_tokens": None, **defaults}
    options |= {name: fields[name] for name in _SAME if name in fields}
    if "max_output_tokens" in fields:
        options["max_tokens"] = fields["max_output_tokens"]
    if _LOGPROBS in _includes(fields):
        options["logprobs"] = fields.get("top_logprobs", 0)
    if fields.get("truncation", "disabled") not in ("disabled", "auto"):
        raise RequestError(f"'truncation' must be disabled or auto, not {shown(fields['truncation'])}")
    text = _object("text", fields.get("text", {}))
    if "format" in text:
        options["structured_output"] = _form(text["format"])
    items = _items(fields.get("input", []))
    ignored: list[str] = []
    messages = [*before, *joined(message for item in items for message in read_item(item, ignored))]
    _check_calls(messages)
    if not messages:
        raise RequestError("'input' must be a string or a list of at least 1 item")
    instructions = text_field("instructions", fields.get("instructions"))
    system = [Message("system", (Text(instructions),))] if instructions else []
    tools = read_tools(fields.get("tools", []))
    reasoning = _object("reasoning", fields.get("reasoning", {}))
    effort = reasoning.get("effort")
    prompt = converse(
        [*system, *messages],
        options,
        tools=tools,
        choice=read_tool_choice(fields.get("tool_choice"), tools.left_out),
        variables=thinking(effort or None, options),
        parallel=bool_field("parallel_tool_calls", fields.get("parallel_tool_calls", True)),
        ignored=dict.fromkeys(ignored),
    )
    flags = {name: bool_field(name, fields.get(name, name == "store")) for name in
             ("stream", "store", "background")}  # fmt: skip
    if flags["background"] and not flags["store"]:
        raise RequestError("'background' requires 'store': true; poll the response by its id")
    echo = {**_echo(fields, options), "store": flags["store"], "background": flags["background"]}
    return ResponseAsk(generation_request(prompt, options), messages, items, echo, **flags)


def not_included(body: Mapping[str, Any]) -> Json:
    """Return the parts of a response that a body asks for, but that no model here makes.

    Raises:
        RequestError: ``include`` is not a list of strings.
    """
    return {f"include.{name}": True for name in _includes(body) if name != _LOGPROBS}


def _includes(body: Mapping[str, Any]) -> list[str]:
    given = body.get("include") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"'include' must be a list of strings, not {shown(given)}")
    return given


def _echo(fields: Mapping[str, Any], options: Json) -> Json:
    """Return the fields of the body that the response repeats, with the defaults of missing ones."""
    return {
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": _object("metadata", fields.get("metadata", {})),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
        "temperature": options.get("temperature", 1.0),
        "text": {"format": fields.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": [_echoed_tool(tool) for tool in fields.get("tools", [])],
        "top_p": options.get("top_p", 1.0),
        "truncation": fields.get("truncation", "disabled"),
        "user": fields.get("user"),
        # The specification (openresponses.org) requires these too.
        "presence_penalty": options.get("presence_penalty", 0.0),
        "frequency_penalty": options.get("frequency_penalty", 0.0),
        "top_logprobs": fields.get("top_logprobs", 0),
        "max_tool_calls": None,
        "service_tier": fields.get("service_tier", "default"),
        "safety_identifier": fields.get("safety_identifier"),
        "prompt_cache_key": fields.get("prompt_cache_key"),
    }


def _echoed_tool(tool: Json) -> Json:
    missing: Json = {"description": None, "parameters": None, "strict": None}
    return {**missing, **tool} if tool.get("type") == "function" else tool


def _object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object, not {shown(value)}")
    return value


def _form(form: Any) -> Json | None:
    """Return the structured output options for ``text.format``, which has ``schema`` at its top level."""
    match form:
        case {"type": "json_schema", "schema": schema}:
            return {"json_schema": schema}
    return structured_output(form)


def _items(given: Any) -> list[Json]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return objects("input", given)


def read_item(item: Json, ignored: list[str]) -> list[Message]:
    """Return an item of a conversation as messages.

    Args:
        item: of the input, or of the output of an earlier response.
        ignored: takes the kinds of items that say nothing to a model here, such as calls of hosted tools.

    Raises:
        RequestError: the item is malformed.
    """
    match item:
        case {"type": "compaction"}:
            return summary_messages(item)
        case {"type": "function_call", "call_id": str(id_), "name": str(name)}:
            return [Message("assistant", (FunctionCall(name, read_arguments(item.get("arguments")), id_),))]
        case {"type": "custom_tool_call", "call_id": str(id_), "name": str(name)}:
            return [Message("assistant", (FunctionCall(name, {"input": item.get("input", "")}, id_),))]
        case {"type": "local_shell_call", "call_id": str(id_)}:
            return [Message("assistant", (FunctionCall("local_shell", item.get("action") or {}, id_),))]
        case {"type": str(kind), "call_id": str(id_)} if kind in _RESULTS:
            return [Message("tool", (FunctionResult(read_result(item.get("output", "")), id_),))]
        case {"type": "reasoning"}:
            thought = "".join(map(_thought, read_parts(item.get("content") or [])))
            return [Message("assistant", (Reasoning(thought),) if thought else ())]
        case {"role": str(role)} if item.get("type", "message") == "message":
            return [Message(read_role(role), tuple(read_parts(item.get("content", ""))))]
        case {"type": str(kind)} if kind not in _OWN:
            ignored.append(f"input.{kind}")
            return []
    raise RequestError(
        f"an item of 'input' of type {shown(item.get('type'))} is not supported: {shown(item, 200)}"
    )


_RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# Kinds whose items are malformed if no case above took them; what ``item_reference`` names is not sent.
_OWN = ("message", "function_call", "custom_tool_call", "local_shell_call", "item_reference", *_RESULTS)


def _thought(part: Part) -> str:
    return part.text if isinstance(part, Text | Reasoning) else ""


def _check_calls(messages: Sequence[Message]) -> None:
    """Check that each result of a function follows its call, as chat templates expect."""
    called = set[str]()
    for message in messages:
        called.update(call.id for call in message.calls)
        for part in message.parts:
            if isinstance(part, FunctionResult) and part.id not in called:
                raise RequestError(f"there is no function call {shown(part.id, 200)} before its output")
