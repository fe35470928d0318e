"""``/v1/responses``: read request bodies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .....errors import RequestError
from ...core.messages import Conversation, GenerationRequest
from ...core.tool_choice import calls_schema
from .compaction import summary_turns
from .reading import (
    Json,
    bool_field,
    generation_request,
    objects_field,
    read_json,
    structured_output,
    text_field,
)

KNOWN = frozenset(
    {"model", "input", "instructions", "previous_response_id", "store", "stream", "background", "metadata"}
    | {"temperature", "top_p", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "text"}
    | {"reasoning", "user", "truncation", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"stream_options", "top_k", "min_p", "seed", "stop", "ignore_eos", "priority", "timeout", "cache_salt"}
    | {"presence_penalty", "frequency_penalty", "include", "top_logprobs"}
)
_LOGPROBS = "message.output_text.logprobs"
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "user", "priority",
         "timeout", "cache_salt", "presence_penalty", "frequency_penalty")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseAsk:
    """The content of a request body.

    Args:
        request: the request for the engine.
        turns: the messages without the instructions, which a later response continues.
        items: the input items.
        echo: the fields of the body that the response repeats.
        stream: whether to stream events; in the background also to keep them.
        store: whether to store the response.
        background: whether to return at once and generate in the background.
    """

    request: GenerationRequest
    turns: list[Json]
    items: list[Json]
    echo: Json
    stream: bool
    store: bool
    background: bool


def read_response(body: Mapping[str, Any], defaults: Mapping[str, Any], before: list[Json]) -> ResponseAsk:
    """Return the content of a body.

    Args:
        body: the request body.
        defaults: the model's default sampling options.
        before: the messages of the conversation to continue.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    options: Json = {"max_tokens": None, **defaults}
    options |= {name: given[name] for name in _SAME if name in given}
    if "max_output_tokens" in given:
        options["max_tokens"] = given["max_output_tokens"]
    if _LOGPROBS in _includes(given):
        options["logprobs"] = given.get("top_logprobs", 0)
    if given.get("truncation", "disabled") not in ("disabled", "auto"):
        raise RequestError(f"'truncation' must be disabled or auto, not {given['truncation']!r}")
    text = _object("text", given.get("text", {}))
    if "format" in text:
        options["structured_output"] = _form(text["format"])
    items = _items(given.get("input", []))
    turns = [*before, *joined_turns(turn for item in items for turn in _turns(item))]
    _check_calls(turns)
    if not turns:
        raise RequestError("'input' must be a string or a list of at least 1 item")
    instructions = text_field("instructions", given.get("instructions"))
    system: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    tools = objects_field("tools", given.get("tools", []))
    reasoning = _object("reasoning", given.get("reasoning", {}))
    effort = reasoning.get("effort")
    prompt = _conversation([*system, *turns], tools, {"reasoning_effort": effort} if effort else {}, given,
                           options)  # fmt: skip
    flags = {name: bool_field(name, given.get(name, name == "store")) for name in
             ("stream", "store", "background")}  # fmt: skip
    if flags["background"] and not flags["store"]:
        raise RequestError("'background' requires 'store': true; poll the response by its id")
    echo = {**_echo(given, options, tools), "store": flags["store"], "background": flags["background"]}
    return ResponseAsk(generation_request(prompt, options), turns, items, echo, **flags)


def not_included(body: Mapping[str, Any]) -> Json:
    """Return the parts of a response that a body asks for, but that no model here makes.

    Raises:
        RequestError: ``include`` is not a list of strings.
    """
    return {f"include.{name}": True for name in _includes(body) if name != _LOGPROBS}


def _includes(body: Mapping[str, Any]) -> list[str]:
    given = body.get("include") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"'include' must be a list of strings, not {given!r}")
    return given


def _echo(given: Mapping[str, Any], options: Json, tools: list[Json]) -> Json:
    """Return the fields of the body that the response repeats, with the defaults of missing ones."""
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": _object("metadata", given.get("metadata", {})),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
        "temperature": options.get("temperature", 1.0),
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in tools],
        "top_p": options.get("top_p", 1.0),
        "truncation": given.get("truncation", "disabled"),
        "user": given.get("user"),
        # The specification (openresponses.org) requires these too.
        "presence_penalty": options.get("presence_penalty", 0.0),
        "frequency_penalty": options.get("frequency_penalty", 0.0),
        "top_logprobs": given.get("top_logprobs", 0),
        "max_tool_calls": None,
        "service_tier": given.get("service_tier", "default"),
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
    }


def _object(name: str, value: Any) -> Json:
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object, not {value!r}")
    return value


def _form(given: Any) -> Json | None:
    """Return the structured output options for ``text.format``, which has ``schema`` at its top level."""
    match given:
        case {"type": "json_schema", "schema": schema}:
            return {"json_schema": schema}
    return structured_output(given)


def _conversation(
    messages: list[Json], tools: list[Json], variables: Json, given: Mapping[str, Any], options: Json
) -> Conversation:
    parallel = bool_field("parallel_tool_calls", given.get("parallel_tool_calls", True))
    nested = [_tool(tool) for tool in tools]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        nested, choice = _allowed(nested, choice)
    match choice:
        case "auto":
            return Conversation(messages, nested, variables, parallel_calls=parallel)
        case "none":
            return Conversation(messages, [], variables)
        case "required":
            only = None
        case {"type": "function", "name": str(name)}:
            only = name
        case other:
            raise RequestError(
                f"'tool_choice' must be auto, none, required, a function or allowed_tools, not {other!r}"
            )
    if options.get("structured_output") is not None:
        raise RequestError("a forced 'tool_choice' and 'text.format' exclude each other; omit one")
    options["structured_output"] = {"json_schema": calls_schema(nested, only, parallel=parallel)}
    return Conversation(messages, nested, {**variables, "enable_thinking": False}, must_call=True)


def _allowed(nested: list[Json], choice: Json) -> tuple[list[Json], Any]:
    """Return the tools that a choice of type ``allowed_tools`` names, and its mode."""
    names = {tool.get("name") for tool in objects_field("tool_choice.tools", choice.get("tools"))}
    known = {tool["function"]["name"] for tool in nested}
    if not names or not names <= known:
        raise RequestError(f"'tool_choice.tools' must name some of {sorted(known)}, not {choice['tools']!r}")
    return [tool for tool in nested if tool["function"]["name"] in names], choice.get("mode", "auto")


def _tool(tool: Json) -> Json:
    """Return a tool in the format that chat templates expect."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestError(f"each tool must be of type 'function', with a string 'name', not {tool!r}")
    parts = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": parts}


def _items(given: Any) -> list[Json]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return objects_field("input", given)


def _turns(item: Json) -> list[Json]:
    """Return an item of the input as messages for chat templates."""
    return summary_turns(item) if item.get("type") == "compaction" else [turn_of(item)]


def turn_of(item: Json) -> Json:
    """Return an item as a message for chat templates."""
    match item:
        case {"type": "function_call", "call_id": str(name), "name": str(function)}:
            arguments = read_json(item.get("arguments", "{}"), f"the arguments of '{function}'")
            call = {"name": function, "arguments": arguments}
            calls = [{"id": name, "type": "function", "function": call}]
            return {"role": "assistant", "content": "", "tool_calls": calls}
        case {"type": "function_call_output", "call_id": str(name)}:
            return {"role": "tool", "tool_call_id": name, "content": _text(item.get("output", ""))}
        case {"type": "reasoning"}:
            return {"role": "assistant", "content": "", "reasoning_content": _text(item.get("content") or "")}
        case {"role": "user" | "assistant" | "system" | "developer" as role} if (
            item.get("type", "message") == "message"
        ):
            role = "system" if role == "developer" else role
            return {"role": role, "content": _text(item.get("content", ""))}
    raise RequestError(f"an item of 'input' of type {item.get('type')!r} is not supported: {item!r:.100}")


def _check_calls(turns: Sequence[Json]) -> None:
    """Check that each result of a function follows its call, as chat templates expect."""
    called = set[str]()
    for turn in turns:
        called.update(call["id"] for call in turn.get("tool_calls", ()))
        if turn["role"] == "tool" and turn["tool_call_id"] not in called:
            raise RequestError(f"there is no function call '{turn['tool_call_id']}' before its output")


def _text(content: Any) -> str:
    """Return a string, or the joined text of a list of parts."""
    if isinstance(content, str):
        return content
    parts = objects_field("content", content)
    for part in parts:
        if not isinstance(part.get("text"), str):
            raise RequestError(f"content of type {part.get('type')!r} is not supported, only text")
    return "".join(part["text"] for part in parts)


def joined_turns(turns: Iterator[Json]) -> Iterator[Json]:
    """Merge consecutive assistant messages (reasoning, text, calls) into one message per answer."""
    last: Json | None = None
    for turn in turns:
        if last is not None and last["role"] == turn["role"] == "assistant":
            calls = [*last.get("tool_calls", []), *turn.get("tool_calls", [])]
            thought = last.get("reasoning_content", "") + turn.get("reasoning_content", "")
            last = {"role": "assistant", "content": last["content"] + turn["content"]}
            last |= {"tool_calls": calls} if calls else {}
            last |= {"reasoning_content": thought} if thought else {}
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last
