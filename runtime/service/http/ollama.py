"""Ollama's API: chat, generate, embed, embeddings, tags, ps, pull, show, version.

A service makes and removes no models, and says so at create, copy, push, delete and blobs.

See https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import (
    CarryallError,
    ChatTemplateError,
    RequestError,
    UnknownModelError,
    UnsupportedTaskError,
)
from ....options import shown
from ....plain_json import json_bytes
from ...models.model_source import ModelSummary
from ...text.infill import Infill
from ..core.answer_parts import AnswerParts, CallDelta
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
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler
from ..core.messages import Delta, Generation, GenerationRequest, Usage, refuse_cancelled
from ..core.model_entry import ModelStatus
from .errors import described, plain_error
from .openai.embeddings import asked_vectors, read_embeddings
from .openai.reading import bool_field, generation_request, text_field
from .service import HttpService, json_response, list_ignored, service_of
from .sse import streamed, while_connected

Json = dict[str, Any]

_log = logging.getLogger(__name__)

_COMMON = frozenset({"model", "stream", "options", "format", "think", "keep_alive"})
_CHAT = _COMMON | {"messages", "tools"}
_GENERATE = _COMMON | {"prompt", "system", "raw", "suffix", "template", "context", "images"}
# Maps Ollama's option names to ours. Machine options (num_ctx, num_gpu, ...) are settings of the service.
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty",
         "frequency_penalty", "watermark", "repetition_guard", "mirostat", "mirostat_tau",
         "mirostat_eta")  # fmt: skip


async def chat(request: Request) -> Response:
    """Handle ``POST /api/chat``: continue a conversation."""
    service = service_of(request)
    body, headers = await service.known_body(request, _CHAT)
    handler = await _llm(service, request, body, headers)
    messages = [read_message(message) for message in objects("messages", body.get("messages") or [])]
    if not messages:
        return json_response({**_frame(handler), **_message({}), **_loaded(body)}, headers)
    tools = read_tools(body.get("tools") or [])
    talk = converse(messages, {}, tools=tools, variables=_variables(body), continues=None)
    asked = _asked(talk, handler, body)
    return await _answer(
        request, handler, await service.admitted(asked, headers), body, headers, chat_form=True
    )


async def generate(request: Request) -> Response:
    """Handle ``POST /api/generate``: continue a text.

    It uses the chat template, unless ``raw`` is true or the model has none.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, _GENERATE)
    handler = await _llm(service, request, body, headers)
    if body.get("template"):
        raise RequestError("'template' is not supported")
    prompt = text_field("prompt", body.get("prompt")) or ""
    if not prompt:
        return json_response({**_frame(handler), "response": "", **_loaded(body)}, headers)
    if suffix := text_field("suffix", body.get("suffix")):
        gap = _asked(Infill(prompt, suffix), handler, body)
        return await _answer(
            request, handler, await service.admitted(gap, headers), body, headers, chat_form=False
        )
    system = text_field("system", body.get("system"))
    messages = [Message("system", (Text(system),))] if system else []
    user = read_message({"role": "user", "content": prompt, "images": body.get("images")})
    conversation = converse([*messages, user], {}, variables=_variables(body))
    raw = bool_field("raw", body.get("raw") or False) or not await _has_template(handler, conversation)
    if raw:
        user.require_text()
    asked = _asked(prompt if raw else conversation, handler, body)
    return await _answer(
        request, handler, await service.admitted(asked, headers), body, headers, chat_form=False
    )


async def _has_template(handler: LLMHandler, conversation: Conversation) -> bool:
    try:
        await handler.tokenize(conversation)
    except ChatTemplateError:
        return False
    return True


async def _llm(
    service: HttpService, request: Request, body: Mapping[str, Any], headers: MutableMapping[str, str]
) -> LLMHandler:
    """Return the handler of the model that a body names, which stays loaded for its ``keep_alive``."""
    _keep(service, body, headers)
    return await service.llm(request, _own_name(body.get("model")))


async def _embedder(
    service: HttpService, body: Mapping[str, Any], headers: MutableMapping[str, str]
) -> LLMHandler | EncoderHandler:
    _keep(service, body, headers)
    return await service.embedder(_own_name(body.get("model")))


def _keep(service: HttpService, body: Mapping[str, Any], headers: MutableMapping[str, str]) -> None:
    """Keep the model that a body names for its ``keep_alive``, if the caller may do that."""
    seconds = body.get("keep_alive")
    if seconds is None:
        return
    name = _own_name(body.get("model"))
    if isinstance(name, str | None) and not service.admission.keep(name, _seconds(seconds)):
        list_ignored(headers, ["keep_alive"])


_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(keep_alive: Any) -> float:
    """Return a ``keep_alive`` in seconds: a number, or a text as Go writes durations; below 0 is for good.

    Raises:
        RequestError: it is neither.
    """
    try:
        if isinstance(keep_alive, str) and (found := _DURATION.fullmatch(keep_alive)):
            parts = re.findall(r"([\d.]+)([a-zµ]+)", found[2])
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) * (-1 if found[1] else 1)
        elif isinstance(keep_alive, bool):
            raise ValueError
        else:
            seconds = float(keep_alive)
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise RequestError(
            f"'keep_alive' must be a number of seconds or a text such as \"5m\", not {shown(keep_alive)}"
        )
    return math.inf if seconds < 0 else seconds


def _loaded(body: Mapping[str, Any]) -> Json:
    """Return the end of an answer to a request without a prompt, which loads a model or lets it go."""
    gone = body.get("keep_alive") is not None and _seconds(body["keep_alive"]) == 0
    return {"done": True, "done_reason": "unload" if gone else "load"}


def _own_name(name: Any) -> Any:
    return name.removesuffix(":latest") if isinstance(name, str) else name


def _variables(body: Mapping[str, Any]) -> Json:
    think = body.get("think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"enable_thinking": bool_field("think", think)}


def _asked(
    prompt: str | Conversation | Infill, handler: LLMHandler, body: Mapping[str, Any]
) -> GenerationRequest:
    sampling = body.get("options") or {}
    if not isinstance(sampling, dict):
        raise RequestError(f"'options' must be an object, not {shown(sampling)}")
    options: Json = {"max_tokens": None, **handler.defaults}
    options |= {name: sampling[name] for name in _SAME if sampling.get(name) is not None}
    options |= {
        ours: sampling[theirs] for theirs, ours in _OPTIONS.items() if sampling.get(theirs) is not None
    }
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
        result = await while_connected(request.receive, handler.complete(asked))
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
    return json_bytes(document) + b"\n"


def _frame(handler: LLMHandler) -> Json:
    return {"model": handler.name, "created_at": datetime.now(UTC).isoformat()}


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
    choice: Delta = result.choices[0]
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
    handler = await _embedder(service, body, headers)
    ask = read_embeddings({"input": body.get("input"), "dimensions": body.get("dimensions")})
    start = time.monotonic_ns()
    truncate = body.get("truncate")  # Ollama cuts unless it is false
    cut = bool_field("truncate", True if truncate is None else truncate)
    embeddings = await while_connected(request.receive, handler.embed(ask.inputs, truncate=cut))
    answer = {
        "model": handler.name,
        "embeddings": asked_vectors(ask, embeddings).tolist(),
        "total_duration": time.monotonic_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": embeddings.prompt_tokens,
    }
    return json_response(answer, headers)


async def embeddings(request: Request) -> Response:
    """Handle ``POST /api/embeddings``, the older form of ``/api/embed``: return one vector."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "prompt", "options", "keep_alive"})
    handler = await _embedder(service, body, headers)
    prompt = text_field("prompt", body.get("prompt"))
    if not prompt:  # loads the model
        return json_response({"embedding": []}, headers)
    found = await while_connected(request.receive, handler.embed([prompt], truncate=True))
    return json_response({"embedding": found.vectors[0].tolist()}, headers)


async def tags(request: Request) -> Response:
    """Handle ``GET /api/tags``: list the models that requests may name."""
    return json_response({"models": await _listed(request, running=False)})


async def running(request: Request) -> Response:
    """Handle ``GET /api/ps``: list the models that are in memory."""
    return json_response({"models": await _listed(request, running=True)})


async def _listed(request: Request, *, running: bool) -> list[Json]:
    listed = []
    for status in service_of(request).admission.models():
        if status.kind == "tensor" or not (status.state == "ready" if running else status.on_request):
            continue
        summary = await asyncio.to_thread(_summary, status)  # the first call reads the graph
        for name in (status.name, *status.aliases):
            model = _model(name, summary)
            if running:
                length = status.info.context_length if status.info else 0
                model |= {
                    "expires_at": _moment(status.seconds_left),
                    "size_vram": 0,
                    "context_length": length,
                }
                del model["modified_at"]
            listed.append(model)
    return listed


def _summary(status: ModelStatus) -> ModelSummary | None:
    """Return what is known of a model; a file that is gone must not hide the others."""
    try:
        return status.summary()
    except CarryallError as error:
        _log.warning("the model %a cannot be described: %s", status.name, error)
        return None


def _moment(seconds: float) -> str:
    """Return the moment in so many seconds; of a model that stays in memory one in centuries."""
    return (datetime.now(UTC) + timedelta(seconds=min(seconds, 9e9))).isoformat()


def _model(name: str, summary: ModelSummary | None) -> Json:
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(summary.modified if summary else 0, UTC).isoformat(),
        "size": summary.bytes if summary else 0,
        "digest": summary.digest if summary else "",
        "details": _details(summary),
    }


def _details(summary: ModelSummary | None) -> Json:
    family = summary.family if summary else ""
    return {
        "parent_model": "",
        "format": "onnx",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": _in_short(summary.parameters) if summary else "",
        "quantization_level": summary.quantization if summary else "",
    }


def _in_short(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 7.3M; empty if it is unknown."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count) if count else ""


async def show(request: Request) -> Response:
    """Handle ``POST /api/show``: describe one model."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "name", "verbose"})
    handler = await _embedder(service, {"model": body.get("model", body.get("name"))}, headers)
    if isinstance(handler, EncoderHandler):
        facts: Json = {"general.architecture": "onnx"}
        capabilities = ["embedding"] if handler.embeds else []
        answer = {"details": _details(None), "model_info": facts, "capabilities": capabilities}
        return json_response(answer, headers)
    summary = await asyncio.to_thread(handler.served.summary)
    family = (summary.family if summary else "") or "onnx"
    facts = {"general.architecture": family, f"{family}.context_length": handler.info.context_length}
    if summary is not None and summary.parameters:
        facts["general.parameter_count"] = summary.parameters
    capabilities = ["completion", "tools", *(["vision"] if handler.info.reads_images else [])]
    answer = {"details": _details(summary), "model_info": facts, "capabilities": capabilities}
    return json_response(answer, headers)


async def pull(request: Request) -> Response:
    """Handle ``POST /api/pull``: succeed for a model that is served, since a service downloads none."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"model", "name", "insecure", "stream"})
    name = body.get("model", body.get("name"))
    try:
        await _embedder(service, {"model": name}, headers)
    except UnknownModelError as error:
        raise UnknownModelError(
            f"{error}. A service downloads no models: start it with this one (carryall serve MODEL)"
        ) from error
    success = {"status": "success"}
    if not bool_field("stream", body.get("stream", True)):
        return json_response(success, headers)
    lines = b"".join(map(_line, ({"status": "pulling manifest"}, success)))
    return Response(lines, 200, headers, "application/x-ndjson")


# What a service refuses, by path: the method, and why.
_REFUSED = {
    "/api/create": ("POST", "creates no models; write a folder with carryall export, and serve it"),
    "/api/copy": ("POST", "copies no models; give one a further name with carryall serve --alias"),
    "/api/push": ("POST", "uploads no models"),
    "/api/delete": ("DELETE", "deletes no models; keep_alive 0 lets one go from memory"),
    "/api/blobs/{digest}": (
        "POST",
        "takes no files of models; start it with this one (carryall serve MODEL)",
    ),
}


async def refuse(request: Request) -> Response:
    """Handle what would change the models of a service.

    Raises:
        UnsupportedTaskError: always.
    """
    raise UnsupportedTaskError(f"a service {_REFUSED[request.scope['route'].path][1]}")


async def version(request: Request) -> Response:
    """Handle ``GET /api/version``: return the version of carryall."""
    return json_response({"version": importlib.metadata.version("carryall")})


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", embeddings, methods=["POST"]),
        Route("/api/ps", running),
        Route("/api/pull", pull, methods=["POST"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/version", version),
        *(
            Route(path, refuse, methods=[method], include_in_schema=False)
            for path, (method, _) in _REFUSED.items()
        ),
    ]
