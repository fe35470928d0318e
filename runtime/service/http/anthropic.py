"""Anthropic's endpoints ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError
from ....options import shown
from ..core.answer_parts import AnswerParts, CallDelta, understood
from ..core.chat import (
    Message,
    Text,
    arguments_object,
    converse,
    objects,
    read_message,
    read_parts,
    read_tool_choice,
    read_tools,
    thinking,
)
from ..core.messages import Delta, Generation, GenerationRequest, Usage, refuse_cancelled
from .openai.reading import bool_field, generation_request
from .service import HttpService, json_response, service_of
from .sse import event, streamed, while_connected

Json = dict[str, Any]

_KNOWN = frozenset(
    {"model", "max_tokens", "messages", "system", "stop_sequences", "stream", "temperature", "top_p", "top_k"}
    | {"tools", "tool_choice", "thinking", "metadata", "service_tier", "output_config", "cache_control"}
    | {"watermark", "repetition_guard"}
)
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "watermark", "repetition_guard")


async def create_message(request: Request) -> Response:
    """Handle ``POST /v1/messages``: generate a message."""
    service = service_of(request)
    body, headers = await service.known_body(request, _KNOWN)
    handler = await service.llm(request, body.get("model"))
    if body.get("max_tokens") is None:  # as in Anthropic's API, which has no default
        raise RequestError("'max_tokens' is required: give a number of at least 1")
    stream = bool_field("stream", body.get("stream") or False)
    asked = await service.admitted(read_body(body, handler.defaults), headers)
    model = handler.name
    if not stream:
        result = await while_connected(request.receive, handler.complete(asked))
        return json_response(message_json(asked, result, model), headers)

    async def pieces() -> AsyncGenerator[bytes, None]:
        events = MessageEvents(asked, model)
        async with aclosing(handler.generate(asked)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                yield b"".join([event(one, one["type"]) for one in events.of(delta)])

    def late(error: Exception) -> bytes:
        from .errors import anthropic_error, described

        return event(anthropic_error(*described(error)), "error")

    return streamed(request, pieces(), headers=headers, late_error=late, ping=_ping)


def _ping() -> bytes:
    return event({"type": "ping"}, "ping")


async def count_tokens(request: Request) -> Response:
    """Handle ``POST /v1/messages/count_tokens``: return the number of prompt tokens."""
    service = service_of(request)
    body, headers = await service.known_body(request, _KNOWN)
    handler = await service.llm(request, body.get("model"))
    tokens = await handler.tokenize(read_body({**body, "max_tokens": 1}, {}).prompt)
    return json_response({"input_tokens": len(tokens)}, headers)


# A line that Claude Code puts before the system prompt. It differs in each conversation and says nothing to a
# model; with it, no two conversations would share a cached prefix.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)


def read_body(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> GenerationRequest:
    """Return the generation request for a body.

    Raises:
        RequestError: a field is invalid or not supported.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    options: Json = {**defaults, **{name: fields[name] for name in _SAMPLING if name in fields}}
    if "stop_sequences" in fields:
        options["stop"] = fields["stop_sequences"]
    metadata = fields.get("metadata") or {}
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        options["user"] = metadata["user_id"]
    system = read_parts(fields.get("system", ""), "'system' must be a text or a list of text blocks")
    turns = [(turn, read_message(turn)) for turn in objects("messages", fields.get("messages"))]
    talk = [message for turn, message in turns if message.parts or isinstance(turn["content"], str)]
    if not talk:
        raise RequestError("'messages' must have at least 1 message with content")
    # Claude Code begins its system prompt with a line that changes at each request. It says nothing to a
    # model, and would leave the prefix cache nothing to share.
    if system and isinstance(first := system[0], Text):
        text = _BILLING.sub("", first.text)
        system = [Text(text), *system[1:]] if text else system[1:]
    messages = [Message("system", tuple(system)), *talk] if any(system) else talk
    tools = read_tools(fields.get("tools", []))
    variables = _thinking(fields.get("thinking"), options)
    output = fields.get("output_config") or {}
    if not isinstance(output, dict):
        raise RequestError(f"'output_config' must be an object, not {shown(output)}")
    if output.get("effort") is not None:
        variables |= thinking(output["effort"], options)
    if output.get("format") is not None:
        options["structured_output"] = _form(output["format"])
    choice = fields.get("tool_choice")
    single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")
    prompt = converse(
        messages,
        options,
        tools=tools,
        choice=read_tool_choice(choice, tools.left_out),
        variables=variables,
        parallel=not single,
        continues=None,
    )
    return dataclasses.replace(generation_request(prompt, options), pin_seconds=_pin(fields))


_LIFE = {"5m": 300.0, "1h": 3600.0}


def _pin(prompt_fields: Json) -> float:
    """Return the longest time that a ``cache_control`` of a body asks for, in seconds; 0 without one."""
    system, tools = prompt_fields.get("system"), prompt_fields.get("tools") or []
    blocks = [prompt_fields, *(system if isinstance(system, list) else []), *tools]
    for turn in prompt_fields["messages"]:
        blocks += turn["content"] if isinstance(turn["content"], list) else []
    seconds = 0.0
    for block in blocks:
        control = block.get("cache_control") if isinstance(block, dict) else None
        if control is None:
            continue
        life = control.get("ttl", "5m") if isinstance(control, dict) else None
        if not isinstance(life, str) or life not in _LIFE or control.get("type") != "ephemeral":
            raise RequestError(
                "'cache_control' must be {\"type\": \"ephemeral\"}, with a 'ttl' of 5m or 1h, not "
                f"{shown(control)}"
            )
        seconds = max(seconds, _LIFE[life])
    return seconds


def _form(form: Any) -> Json:
    match form:
        case {"type": "json_schema", "schema": schema}:
            return {"json_schema": schema}
    raise RequestError(f"'output_config.format' must have the type json_schema, not {shown(form)}")


def _thinking(thinking_options: Any, options: Json) -> Json:
    match thinking_options:
        case {"type": "enabled", "budget_tokens": int(budget)} if budget >= 0 and not isinstance(
            budget, bool
        ):
            options["reasoning_budget"] = budget
            return {"enable_thinking": True}
        case None | {"type": "adaptive"}:
            return {}
        case {"type": "enabled"}:
            return {"enable_thinking": True}
        case {"type": "disabled"}:
            return {"enable_thinking": False}
    raise RequestError(
        f"'thinking' must have the type enabled, disabled or adaptive, not {shown(thinking_options)}"
    )


def _stop(reason: str | None, stop: str | int | None, *, calls: bool) -> tuple[str, str | None]:
    """Return ``stop_reason`` and ``stop_sequence``."""
    if calls and reason == "stop":
        return "tool_use", None
    if isinstance(stop, str) and reason == "stop":
        return "stop_sequence", stop
    return ("end_turn" if reason == "stop" else "max_tokens"), None


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def message_json(asked: GenerationRequest, result: Generation, model: str) -> Json:
    """Return the JSON of a complete message."""
    choice = understood(asked, result.choices[0])
    content: list[Json] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text or not choice.tool_calls:
        content.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        block = {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": arguments_object(call.arguments),
        }
        content.append(block)
    reason, sequence = _stop(choice.finish_reason, choice.stop_reason, calls=bool(choice.tool_calls))
    return {
        "id": f"msg_{result.request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(result.usage),
    }


class MessageEvents:
    """Convert deltas to stream events. Each content block has start, delta and stop events.

    Args:
        asked: the request to answer.
        model: the name of the model.
    """

    def __init__(self, asked: GenerationRequest, model: str) -> None:
        self._parts = AnswerParts(asked)
        self._model = model
        self._begun = False
        self._block: tuple[str, int] | None = None  # kind, and index of the tool call (else 0)
        self._index = -1

    def of(self, delta: Delta) -> Iterator[Json]:
        """Return the events of a delta."""
        if not self._begun:
            self._begun = True
            yield self._start(delta)
        for part in self._parts.of(delta):
            if isinstance(part, CallDelta):
                if part.name is not None:
                    block: Json = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                    yield from self._open(("call", part.index), block)
                if part.arguments:
                    yield self._grow({"type": "input_json_delta", "partial_json": part.arguments})
            elif part.kind == "reasoning":
                yield from self._open(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
                yield self._grow({"type": "thinking_delta", "thinking": part.text})
            else:
                yield from self._open(("text", 0), {"type": "text", "text": ""})
                yield self._grow({"type": "text_delta", "text": part.text})
        if delta.usage is not None:
            yield from self._end(delta, delta.usage)

    def _start(self, delta: Delta) -> Json:
        usage = _usage(Usage(delta.prompt_tokens, len(delta.token_ids), delta.cached_tokens))
        message: Json = {
            "id": f"msg_{delta.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return {"type": "message_start", "message": message}

    def _open(self, block: tuple[str, int], content: Json) -> Iterator[Json]:
        if self._block == block:
            return
        yield from self._close()
        self._block = block
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": content}

    def _grow(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._block = None

    def _end(self, delta: Delta, usage: Usage) -> Iterator[Json]:
        if self._index < 0:  # an empty answer has 1 empty text block
            yield from self._open(("text", 0), {"type": "text", "text": ""})
        yield from self._close()
        reason, sequence = _stop(delta.finish_reason, delta.stop_reason, calls=self._parts.calls > 0)
        end = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": end, "usage": _usage(usage)}
        yield {"type": "message_stop"}


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
