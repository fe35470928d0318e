"""The API of Hugging Face's text-generation-inference: ``/generate``, ``/generate_stream``, ``/info``."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError
from ...types.outputs import Logprob
from ..core.deltas import collect, refuse_cancelled
from ..core.handler import LLMHandler
from ..core.messages import Delta, Generation, GenerationRequest
from .errors import described, tgi_error
from .openai.reading import bool_field, generation_request
from .service import HttpService, json_response, service_of
from .sse import event, streamed, while_connected

Json = dict[str, Any]

_KNOWN = frozenset({"inputs", "parameters", "stream", "model"})
_SAME = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "stop",
         "seed", "best_of")  # fmt: skip
_NAMES = {"max_new_tokens": "max_tokens", "stop_sequences": "stop"}
_READ = {*_SAME, *_NAMES, "do_sample", "details", "decoder_input_details", "return_full_text", "grammar",
         "truncate", "watermark", "top_n_tokens", "adapter_id"}  # fmt: skip
_DRAWN = ("temperature", "top_k", "top_p", "typical_p")  # setting one of these enables sampling
_DEFAULT_TOKENS = 100


async def generate(request: Request) -> Response:
    """Handle ``POST /generate``: return the whole continuation."""
    return await _answer(request, stream=False)


async def generate_stream(request: Request) -> Response:
    """Handle ``POST /generate_stream``: stream one event per token."""
    return await _answer(request, stream=True)


async def either(request: Request) -> Response:
    """Handle ``POST /``: stream if the field ``stream`` is true."""
    return await _answer(request, stream=None)


async def _answer(request: Request, *, stream: bool | None) -> Response:
    service = service_of(request)
    body = await service.body(request)
    given = body.get("parameters") or {}
    if not isinstance(given, dict):
        raise RequestError(f"'parameters' must be an object, not {given!r}")
    parameters = {name: value for name, value in given.items() if name in _READ}
    unknown = {f"parameters.{name}": value for name, value in given.items() if name not in _READ}
    body, headers = service.split({**body, **unknown}, _KNOWN)
    handler = service.llm(request, body.get("model"), parameters.get("adapter_id"))
    prompt = body.get("inputs")
    if not isinstance(prompt, str):
        raise RequestError("'inputs' must be a string")
    asked = service.admission.admitted(generation_request(prompt, _options(handler, parameters)))
    details = bool_field("details", parameters.get("details") or False)
    full = prompt if bool_field("return_full_text", parameters.get("return_full_text") or False) else ""
    if stream if stream is not None else bool_field("stream", body.get("stream") or False):

        def late(error: Exception) -> bytes:
            return event(tgi_error(*described(error)))

        return streamed(request, _events(handler, asked, full), headers=headers, late_error=late)
    if details:
        asked = dataclasses.replace(asked, params=dataclasses.replace(asked.params, logprobs=0))
    result = await while_connected(request.receive, collect(handler.generate(asked)))
    answer = _whole(result, full, asked, details=details)
    return json_response(answer if stream is False else [answer], headers)


def _options(handler: LLMHandler, given: Mapping[str, Any]) -> Json:
    for name in ("watermark", "truncate", "top_n_tokens", "decoder_input_details"):
        if given.get(name):
            raise RequestError(f"'{name}' is not supported")
    drawn = given.get("do_sample") or any(given.get(name) is not None for name in _DRAWN)
    options: Json = {"max_tokens": _DEFAULT_TOKENS, **(handler.model.defaults if drawn else {})}
    if not drawn:
        options["temperature"] = 0.0
    options |= {name: given[name] for name in _SAME if given.get(name) is not None}
    options |= {ours: given[theirs] for theirs, ours in _NAMES.items() if given.get(theirs) is not None}
    match given.get("grammar"):
        case None:
            pass
        case {"type": "json" | "json_schema", "value": schema}:
            options["structured_output"] = {"json_schema": schema}
        case {"type": "regex", "value": str(regex)}:
            options["structured_output"] = {"regex": regex}
        case other:
            raise RequestError(f"'grammar' must have the type json, json_schema or regex, not {other!r}")
    return options


def _whole(result: Generation, full: str, asked: GenerationRequest, *, details: bool) -> Json:
    choice = result.choices[0]
    answer: Json = {"generated_text": full + choice.text}
    if details:
        tokens = [
            _token(token, entry[token].text, entry)
            for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        answer["details"] = {
            "finish_reason": _reason(choice.finish_reason, choice.stop_reason),
            "generated_tokens": len(tokens),
            "seed": asked.params.seed,
            "prefill": [],
            "tokens": tokens,
        }
    return answer


async def _events(handler: LLMHandler, asked: GenerationRequest, full: str) -> AsyncGenerator[bytes, None]:
    reported = dataclasses.replace(asked, params=dataclasses.replace(asked.params, logprobs=0))
    texts: list[str] = []
    count = 0
    async with aclosing(handler.generate(reported)) as deltas:
        async for delta in deltas:
            refuse_cancelled(delta)
            if delta.index:  # with best_of, only the first choice is streamed
                continue
            texts.append(delta.text)
            last = len(delta.token_ids) - 1
            for position, token in enumerate(delta.token_ids):
                count += 1
                end = delta.finish_reason is not None and position == last
                # A delta may hold several tokens but has one text; the last token gets it.
                text = delta.text if position == last else ""
                yield event(
                    {
                        "index": count,
                        "token": _token(token, text, delta.logprobs[position]),
                        "generated_text": full + "".join(texts) if end else None,
                        "details": _details(delta, count, asked) if end else None,
                    }
                )


def _details(delta: Delta, count: int, asked: GenerationRequest) -> Json:
    return {
        "finish_reason": _reason(delta.finish_reason, delta.stop_reason),
        "generated_tokens": count,
        "seed": asked.params.seed,
        "input_length": delta.prompt_tokens,
    }


def _token(token: int, text: str, entry: Mapping[int, Logprob]) -> Json:
    return {"id": token, "text": text, "logprob": entry[token].logprob, "special": False}


def _reason(reason: str | None, stop: str | int | None) -> str:
    if reason == "stop":
        return "stop_sequence" if isinstance(stop, str) else "eos_token"
    return "length"


async def info(request: Request) -> Response:
    """Handle ``GET /info``: describe the default model."""
    facts = service_of(request).llm(request, None).model.info
    return json_response(
        {
            "model_id": facts.model,
            "max_concurrent_requests": facts.max_slots,
            "max_total_tokens": facts.context_length,
            "max_input_tokens": facts.context_length - 1,
            "version": facts.server_version,
        }
    )


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/generate", generate, methods=["POST"]),
        Route("/generate_stream", generate_stream, methods=["POST"]),
        Route("/", either, methods=["POST"]),
        Route("/info", info),
    ]
