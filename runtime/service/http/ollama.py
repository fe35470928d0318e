"""Ollama's API: chat, generate, embed, tags, show, version.

See https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import ChatTemplateError, RequestError
from ....options import shown
from ..core.answer_parts import AnswerParts
from ..core.chat import (
    Conversation,
    Message,
    Text,
    arguments_object,
    converse,
    objects,
    read_message,
    read_tools,
)
from ..core.deltas import collect, refuse_cancelled
from ..core.handler import LLMHandler
from ..core.messages import Choice, Delta, Generation, GenerationRequest, Usage
from ..core.tool_choice import CallDelta
from .errors import described, plain_error
from .openai.embeddings import cut_vectors, read_embeddings
from .openai.reading import bool_field, generation_request, text_field
from .service import HttpService, json_response, service_of
from .sse import streamed, while_connected

Json = dict[str, Any]

_COMMON = frozenset({"model", "stream", "options", "format", "think", "keep_alive"})
_CHAT = _COMMON | {"messages", "tools"}
_GENERATE = _COMMON | {"prompt", "system", "raw", "suffix", "template", "context", "images"}
# Maps Ollama's option names to ours. Machine options (num_ctx, num_gpu, ...) are settings of the service.
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty",
         "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")  # fmt: skip


async def chat(request: Request) -> Response:
    """Handle ``POST /api/chat``: continue a conversation."""
    service = service_of(request)
    body, headers = await service.known_body(request, _CHAT)
    handler = _llm(service, request, body)
    messages = [read_message(message) for message in objects("messages", body.get("messages") or [])]
    if not messages:
        return json_response({**_frame(handler), **_message({}), "done": True, "done_reason": "load"})
    tools = read_tools(body.get("tools") or [])
    talk = converse(messages, {}, tools=tools, variables=_variables(body), continues=None)
    asked = _asked(talk, handler, body)
    return await _answer(request, handler, service.admitted(asked, headers), body, headers, chat_form=True)


async def generate(request: Request) -> Response:
    """Handle ``POST /api/generate``: continue a text.

    It uses the chat template, unless ``raw`` is true or the model has none.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, _GENERATE)
    handler = _llm(service, request, body)
    for name in ("suffix", "template"):
        if body.get(name):
            raise RequestError(f"'{name}' is not supported")
    prompt = text_field("prompt", body.get("prompt")) or ""
    if not prompt:
        return json_response({**_frame(handler), "response": "", "done": True, "done_reason": "load"})
    system = text_field("system", body.get("system"))
    messages = [Message("system", (Text(system),))] if system else []
    user = read_message({"role": "user", "content": prompt, "images": body.get("images")})
    conversation = converse([*messages, user], {}, variables=_variables(body))
    raw = bool_field("raw", body.get("raw") or False) or not await _has_template(handler, conversation)
    asked = _asked(prompt if raw else conversation, handler, body)
    return await _answer(request, handler, service.admitted(asked, headers), body, headers, chat_form=False)


async def _has_template(handler: LLMHandler, conversation: Conversation) -> bool:
    try:
        await handler.tokenize(conversation)
    except ChatTemplateError:
        return False
    return True


def _llm(service: HttpService, request: Request, body: Mapping[str, Any]) -> LLMHandler:
    return service.llm(request, _own_name(body.get("model")))


def _own_name(name: Any) -> Any:
    return name.removesuffix(":latest") if isinstance(name, str) else name


def _variables(body: Mapping[str, Any]) -> Json:
    think = body.get("think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"enable_thinking": bool_field("think", think)}


def _asked(prompt: str | Conversation, handler: LLMHandler, body: Mapping[str, Any]) -> GenerationRequest:
    given = body.get("options") or {}
    if not isinstance(given, dict):
        raise RequestError(f"'options' must be an object, not {shown(given)}")
    options: Json = {"max_tokens": None, **handler.model.defaults}
    options |= {name: given[name] for name in _SAME if given.get(name) is not None}
    options |= {ours: given[theirs] for theirs, ours in _OPTIONS.items() if given.get(theirs) is not None}
    form = body.get("format")
    if form == "json":
        options["structured_output"] = {"json_object": True}
    elif isinstance(form, dict):
        options["structured_output"] = {"json_schema": form}
    elif form not in (None, ""):
        raise RequestError(f"'format' must be \"json\" or a JSON schema, not {shown(form)}")
    return generation_request(prompt, options)


async def _answer(
    request: Request, handler: LLMHandler, asked: GenerationRequest, body: Mapping[str, Any],
    headers: Mapping[str, str], *, chat_form: bool,
) -> Response:  # fmt: skip
    start = time.monotonic_ns()
    if not bool_field("stream", body.get("stream", True)):
        result = await while_connected(request.receive, collect(handler.generate(asked)))
        return json_response(_whole(handler, result, start, chat_form=chat_form), headers)

    async def pieces() -> AsyncGenerator[bytes, None]:
        lines = _Lines(handler, asked, start, chat_form=chat_form)
        async with aclosing(handler.generate(asked)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                yield b"".join(map(_line, lines.of(delta)))

    def late(error: Exception) -> bytes:
        return _line(plain_error(*described(error)))

    media = "application/x-ndjson"

    def ping() -> bytes:
        """Return a line without news, since clients read every line as JSON."""
        empty = _message({}) if chat_form else {"response": ""}
        return _line({**_frame(handler), **empty, "done": False})

    return streamed(request, pieces(), headers=headers, media_type=media, late_error=late, ping=ping)


def _line(document: Json) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _frame(handler: LLMHandler) -> Json:
    return {"model": handler.model.info.model, "created_at": datetime.now(UTC).isoformat()}


def _message(content: Json) -> Json:
    return {"message": {"role": "assistant", "content": "", **content}}


class _Lines:
    """Converts deltas to the lines of a stream. Tool calls are sent whole, as in Ollama.

    Args:
        handler: the model that answers.
        asked: the request.
        start: when the request arrived, in ns of ``time.monotonic_ns``.
        chat_form: whether lines have a message, as in ``/api/chat``.
    """

    def __init__(self, handler: LLMHandler, asked: GenerationRequest, start: int, *, chat_form: bool) -> None:
        self._handler, self._parts, self._start, self._chat_form = (
            handler,
            AnswerParts(asked),
            start,
            chat_form,
        )
        self._name, self._arguments = "", ""  # the call in progress

    def of(self, delta: Delta) -> list[Json]:
        """Return the lines of a delta."""
        lines: list[Json] = []
        for part in self._parts.of(delta):
            if isinstance(part, CallDelta):
                lines += self._call(part)
            elif part.kind == "reasoning":
                lines.append(
                    _message({"thinking": part.text}) if self._chat_form else {"thinking": part.text}
                )
            else:
                lines.append(_message({"content": part.text}) if self._chat_form else {"response": part.text})
        if delta.usage is not None:
            lines += self._ended_call()
        framed = [{**_frame(self._handler), **line, "done": False} for line in lines]
        if delta.usage is not None:
            empty = _message({}) if self._chat_form else {"response": ""}
            end = _end(delta.finish_reason, delta.usage, self._start)
            framed.append({**_frame(self._handler), **empty, **end})
        return framed

    def _call(self, part: CallDelta) -> list[Json]:
        lines: list[Json] = []
        if part.name is not None:
            lines = self._ended_call()
            self._name = part.name
        self._arguments += part.arguments
        return lines

    def _ended_call(self) -> list[Json]:
        name, arguments = self._name, self._arguments
        self._name, self._arguments = "", ""
        return [_message({"tool_calls": [_call(name, arguments)]})] if name else []


def _whole(handler: LLMHandler, result: Generation, start: int, *, chat_form: bool) -> Json:
    choice: Choice = result.choices[0]
    thought: Json = {"thinking": choice.reasoning} if choice.reasoning else {}
    if chat_form:
        calls = [_call(call.name, call.arguments) for call in choice.tool_calls]
        content = _message({"content": choice.text, **thought} | ({"tool_calls": calls} if calls else {}))
    else:
        content = {"response": choice.text, **thought}
    return {**_frame(handler), **content, **_end(choice.finish_reason, result.usage, start)}


def _call(name: str, arguments: str) -> Json:
    """Return a tool call. Arguments that are not JSON become ``{"arguments": text}``."""
    return {"function": {"name": name, "arguments": arguments_object(arguments)}}


def _end(reason: str | None, usage: Usage, start: int) -> Json:
    total = time.monotonic_ns() - start
    return {
        "done": True,
        "done_reason": reason or "stop",
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(usage.prompt_seconds * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(usage.decode_seconds * 1e9),
    }


async def embed(request: Request) -> Response:
    """Handle ``POST /api/embed``: return one vector for each input."""
    service = service_of(request)
    known = {"model", "input", "truncate", "options", "keep_alive", "dimensions"}
    body, headers = await service.known_body(request, known)
    handler = service.embedder(_own_name(body.get("model")))
    ask = read_embeddings({"input": body.get("input"), "dimensions": body.get("dimensions")})
    start = time.monotonic_ns()
    found = await while_connected(request.receive, handler.embed(ask.inputs))
    answer = {
        "model": handler.name,
        "embeddings": cut_vectors(ask, found).tolist(),
        "total_duration": time.monotonic_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": found.prompt_tokens,
    }
    return json_response(answer, headers)


async def tags(request: Request) -> Response:
    """Handle ``GET /api/tags``: list the models that requests may name."""
    models = service_of(request).admission.models()
    names = [
        name for one in models if one.kind != "tensor" and one.on_request for name in (one.name, *one.aliases)
    ]
    return json_response({"models": [_model(name) for name in names]})


def _model(name: str) -> Json:
    details = {"format": "onnx", "family": "", "families": None, "parameter_size": "",
               "quantization_level": ""}  # fmt: skip
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.now(UTC).isoformat(),
        "size": 0,
        "digest": "",
        "details": details,
    }


async def show(request: Request) -> Response:
    """Handle ``POST /api/show``: describe one model."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "name", "verbose"})
    info = _llm(service, request, {"model": body.get("model", body.get("name"))}).model.info
    facts = {"general.architecture": "onnx", "onnx.context_length": info.context_length}
    details = _model(info.model)["details"]
    answer = {"details": details, "model_info": facts, "capabilities": ["completion", "tools"]}
    return json_response(answer, headers)


async def version(request: Request) -> Response:
    """Handle ``GET /api/version``: return the version of carryall."""
    return json_response({"version": importlib.metadata.version("carryall")})


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/version", version),
    ]
