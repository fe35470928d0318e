"""OpenAI's endpoints for chat completions, completions, embeddings and models."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ....errors import RequestError, UnknownModelError
from ....options import shown
from ..core.handler import LLMHandler
from ..core.messages import Delta, Generation, GenerationRequest, refuse_cancelled
from .openai import chat, completions, embeddings
from .openai.chunks import ChatChunks, CompletionChunks
from .openai.reading import bool_field, text_field
from .service import HttpService, json_response, service_of, with_defaults
from .sse import LastPiece, event, streamed, while_connected

Json = dict[str, Any]
_DONE = event("[DONE]")
_LOAD_LORA = frozenset({"model", "lora_name", "lora_path", "load_inplace"})


async def chat_completions(request: Request) -> Response:
    """Handle ``POST /v1/chat/completions``: continue a conversation."""
    service = service_of(request)
    body, headers = await service.known_body(request, chat.KNOWN)
    handler = await service.llm(request, body.get("model"))
    read, options = chat.read_chat(with_defaults(handler, body))
    asked = await service.admitted(read, headers)
    model = handler.name
    if not options.stream:
        result = await while_connected(request.receive, handler.complete(asked))
        return json_response(chat.chat_response(asked, result, model), headers)

    chunks = ChatChunks(asked, model, options)
    pieces = _events(handler, [asked], lambda _, delta: chunks.of(delta), chunks.last)
    return streamed(request, pieces, headers=headers)


async def text_completions(request: Request) -> Response:
    """Handle ``POST /v1/completions``: continue one or several texts."""
    service = service_of(request)
    body, headers = await service.known_body(request, completions.KNOWN)
    handler = await service.llm(request, body.get("model"))
    read = completions.read_completion(with_defaults(handler, body))
    ask = dataclasses.replace(
        read, requests=[await service.admitted(asked, headers) for asked in read.requests]
    )
    model = handler.name
    prompts = [await _echoed(handler, asked) for asked in ask.requests] if ask.echo else []
    if not ask.stream.stream:
        results = await while_connected(request.receive, _all(handler, ask.requests))
        return json_response(completions.completions_response(ask, results, prompts, model), headers)

    chunks = CompletionChunks(ask, prompts, model)
    return streamed(request, _events(handler, ask.requests, chunks.of, chunks.last), headers=headers)


async def _events(
    handler: LLMHandler,
    requests: list[GenerationRequest],
    of: Callable[[int, Delta], Iterator[Json]],
    last: Callable[[], Iterator[Json]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of requests. The end of the last request and that of the stream are one piece.

    Args:
        handler: answers the requests.
        requests: the requests.
        of: returns the chunks of a delta of the request at a position.
        last: returns the chunks after all requests.
    """
    left, end = len(requests), b""
    async with aclosing(_merged(handler, requests)) as deltas:
        async for position, delta in deltas:
            refuse_cancelled(delta)
            piece = b"".join([event(chunk) for chunk in of(position, delta)])
            left -= delta.usage is not None  # only the last delta of a request has it
            if left:
                yield piece
            else:
                end = piece
    yield LastPiece(end + b"".join([event(chunk) for chunk in last()]) + _DONE)


async def _echoed(handler: LLMHandler, asked: GenerationRequest) -> completions.Echo:
    """Return the text and tokens of a prompt, for a response with ``echo``."""
    tokens = await handler.tokenize(asked.prompt)
    text = asked.prompt if isinstance(asked.prompt, str) else await handler.detokenize(tokens)
    return completions.Echo(text, tokens, await handler.detokenize(tokens[:1]))


async def _all(handler: LLMHandler, requests: list[GenerationRequest]) -> list[Generation]:
    """Return the results of all requests. If one fails, cancel the others."""
    room = _room(handler, requests)

    async def result(asked: GenerationRequest) -> Generation:
        async with room:
            return await handler.complete(asked)

    tasks = [asyncio.ensure_future(result(asked)) for asked in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _room(handler: LLMHandler, requests: list[GenerationRequest]) -> asyncio.Semaphore:
    """Return a semaphore of the requests in progress, since more than the queue holds are refused."""
    return asyncio.Semaphore(max(1, handler.llm.most_together // requests[0].params.num_samples))


async def _merged(
    handler: LLMHandler, requests: list[GenerationRequest]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of all requests in order of arrival, each with the index of its request."""
    if len(requests) == 1:  # needs no task and no queue
        async with aclosing(handler.generate(requests[0])) as only:
            async for one in only:
                yield 0, one
        return
    news: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
    room = _room(handler, requests)

    async def read(position: int, asked: GenerationRequest) -> None:
        async with room, aclosing(handler.generate(asked)) as deltas:
            async for delta in deltas:
                news.put_nowait((position, delta))

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(requests)]
    for task in tasks:
        task.add_done_callback(lambda _: news.put_nowait((0, None)))
    try:
        left = len(tasks)
        while left:
            position, delta = await news.get()
            if delta is not None:
                yield position, delta
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def text_embeddings(request: Request) -> Response:
    """Handle ``POST /v1/embeddings``: return one vector for each input."""
    service = service_of(request)
    body, headers = await service.known_body(request, embeddings.KNOWN)
    handler = await service.embedder(body.get("model"))
    ask = embeddings.read_embeddings(body)
    result = await while_connected(
        request.receive,
        handler.embed(ask.inputs, **ask.options),
    )
    return json_response(embeddings.embeddings_response(ask, result, handler.name), headers)


async def list_models(request: Request) -> Response:
    """Handle ``GET /v1/models``: list the models that requests may name."""
    models = _models_json(request)
    if "anthropic-version" in request.headers:
        listed = [_anthropic_model(name) for name in models]
        ends = {"first_id": next(iter(models), None), "last_id": next(reversed(models), None)}
        return json_response({"data": listed, "has_more": False, **ends})
    return json_response({"object": "list", "data": list(models.values())})


async def get_model(request: Request) -> Response:
    """Handle ``GET /v1/models/{name}``: describe one model."""
    name = request.path_params["name"]
    model = _models_json(request).get(name)
    if model is None:
        raise UnknownModelError(f"there is no model {shown(name)}; GET /v1/models lists them")
    if "anthropic-version" in request.headers:
        return json_response(_anthropic_model(name))
    return json_response(model)


_STARTED = int(time.time())


def _anthropic_model(name: str) -> Json:
    """Return a model in the form of Anthropic's API, which has the same path."""
    created = datetime.fromtimestamp(_STARTED, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _models_json(request: Request) -> dict[str, Json]:
    """Return the models that the caller's requests may name, by each of their names."""
    models: dict[str, Json] = {}
    for status in service_of(request).admission.models():
        if not status.on_request or status.kind == "tensor":
            continue
        facts: Json = {
            "object": "model",
            "created": _STARTED,
            "owned_by": "carryall",
            "root": status.name,
            "parent": None,
            "max_model_len": status.info.context_length if status.info else None,
        }
        versions = () if status.only else (f"{status.name}:{status.version}",)
        for name in (status.name, *status.aliases, *versions):
            models.setdefault(name, {"id": name, **facts})
        for name, folder in status.loras.items():
            models.setdefault(name, {"id": name, **facts, "root": folder, "parent": status.name})
    return models


async def load_lora_adapter(request: Request) -> Response:
    """Handle ``POST /v1/load_lora_adapter`` of vLLM: load an adapter from a folder on the server."""
    service = service_of(request)
    body, headers = await service.known_body(request, _LOAD_LORA)
    name, folder = (_required(body, field) for field in ("lora_name", "lora_path"))
    replace = bool_field("load_inplace", body.get("load_inplace") or False)
    base = text_field("model", body.get("model"))
    await service.admission.load_lora(name, folder, base=base, replace=replace)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=headers)


async def unload_lora_adapter(request: Request) -> Response:
    """Handle ``POST /v1/unload_lora_adapter`` of vLLM: forget an adapter."""
    service = service_of(request)
    body, headers = await service.known_body(request, {"lora_name", "lora_int_id"})
    name = _required(body, "lora_name")
    service.admission.unload_lora(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=headers)


def _required(body: Json, name: str) -> str:
    found = text_field(name, body.get(name))
    if not found:
        raise RequestError(f"'{name}' is required and must be a string")
    return found


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", text_completions, methods=["POST"]),
        Route("/v1/embeddings", text_embeddings, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
        Route("/v1/models/{name:path}", get_model),
    ]
