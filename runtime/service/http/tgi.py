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
from ....options import shown
from ....records import dataclass
from ...types.outputs import Logprob
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler
from ..core.messages import Delta, Generation, GenerationRequest, by_rank, refuse_cancelled
from . import tei
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
_PICTURE = "![](data:"


@dataclass(frozen=True, slots=True)
class _Ask:
    """The content of a request body.

    Args:
        request: the request for the engine.
        full: the text before the continuation: the prompt if ``return_full_text`` is true, else empty.
        details: whether to report tokens.
        top: the number of most likely tokens to report at each position.
        prefill: the tokens of the prompt if their log-probabilities are reported, else empty.
        first: the text of the first of them, which has no log-probability.
    """

    request: GenerationRequest
    full: str
    details: bool
    top: int
    prefill: list[int]
    first: str


async def generate(request: Request) -> Response:
    """Handle ``POST /generate``: return the whole continuation."""
    return await _answer(request, await service_of(request).body(request), stream=False)


async def generate_stream(request: Request) -> Response:
    """Handle ``POST /generate_stream``: stream one event per token."""
    return await _answer(request, await service_of(request).body(request), stream=True)


async def either(request: Request) -> Response:
    """Handle ``POST /``: stream if the field ``stream`` is true; an encoder embeds, ranks or predicts."""
    service = service_of(request)
    body = await service.body(request)
    if isinstance(await service.embedder(body.get("model")), EncoderHandler):
        return await tei.root(request, service, body)
    return await _answer(request, body, stream=None)


async def _answer(request: Request, body: Json, *, stream: bool | None) -> Response:
    service = service_of(request)
    options = body.get("parameters") or {}
    if not isinstance(options, dict):
        raise RequestError(f"'parameters' must be an object, not {shown(options)}")
    parameters = {name: value for name, value in options.items() if name in _READ}
    unknown = {f"parameters.{name}": value for name, value in options.items() if name not in _READ}
    body, headers = service.split({**body, **unknown}, _KNOWN)
    handler = await service.llm(request, body.get("model"), parameters.get("adapter_id"))
    streams = stream if stream is not None else bool_field("stream", body.get("stream") or False)
    ask = await _read(handler, body.get("inputs"), parameters, streams=streams)
    ask = dataclasses.replace(ask, request=await service.admitted(ask.request, headers))
    if streams:

        def late(error: Exception) -> bytes:
            return event(tgi_error(*described(error)))

        return streamed(request, _events(handler, ask), headers=headers, late_error=late)
    result = await while_connected(request.receive, handler.complete(ask.request))
    answer = _whole(result, ask)
    return json_response(answer if stream is False else [answer], headers)


async def _read(handler: LLMHandler, text: Any, parameters: Mapping[str, Any], *, streams: bool) -> _Ask:
    """Return the content of a body.

    Raises:
        RequestError: a parameter is invalid or not supported.
    """
    if not isinstance(text, str):
        raise RequestError("'inputs' must be a string")
    if handler.info.reads_images and _PICTURE in text:
        raise RequestError(
            "'inputs' is a raw prompt, in which a picture as ![](data:...) would stay text; send messages "
            "with 'image_url' to /v1/chat/completions"
        )
    flags = {name: bool_field(name, parameters.get(name) or False) for name in
             ("details", "return_full_text", "decoder_input_details")}  # fmt: skip
    details, prefilled = flags["details"], flags["decoder_input_details"]
    if prefilled and streams:
        raise RequestError("'decoder_input_details' is not supported in streams; use /generate")
    if prefilled and not details:
        raise RequestError("'decoder_input_details' needs 'details': true")
    options, top = _options(handler, parameters), _count("top_n_tokens", parameters)
    if details or streams:
        options["logprobs"] = top
    if prefilled:
        options["prompt_logprobs"] = 0
    most = _count("truncate", parameters, least=1)
    tokens = (await handler.tokenize(text))[-most:] if most or prefilled else []
    request = generation_request(tokens or text, options)
    first = await handler.detokenize(tokens[:1]) if prefilled else ""
    full = text if flags["return_full_text"] else ""
    return _Ask(request, full, details, top, tokens if prefilled else [], first)


def _count(name: str, given: Mapping[str, Any], least: int = 0) -> int:
    """Return a parameter that must be a number of tokens; 0 if it is missing."""
    value = given.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"'{name}' must be an integer of at least {least}, not {shown(value)}")
    return value


def _options(handler: LLMHandler, parameters: Mapping[str, Any]) -> Json:
    drawn = parameters.get("do_sample") or any(parameters.get(name) is not None for name in _DRAWN)
    options: Json = {"max_tokens": _DEFAULT_TOKENS, **(handler.defaults if drawn else {})}
    if not drawn:
        options["temperature"] = 0.0
    if parameters.get("watermark") is not None:
        options["watermark"] = parameters["watermark"]
    options |= {name: parameters[name] for name in _SAME if parameters.get(name) is not None}
    options |= {
        ours: parameters[theirs] for theirs, ours in _NAMES.items() if parameters.get(theirs) is not None
    }
    match parameters.get("grammar"):
        case None:
            pass
        case {"type": "json" | "json_schema", "value": schema}:
            options["structured_output"] = {"json_schema": schema}
        case {"type": "regex", "value": str(regex)}:
            options["structured_output"] = {"regex": regex}
        case other:
            raise RequestError(f"'grammar' must have the type json, json_schema or regex, not {shown(other)}")
    return options


def _whole(result: Generation, ask: _Ask) -> Json:
    choice = result.choices[0]
    answer: Json = {"generated_text": ask.full + choice.text}
    if ask.details:
        tokens = [
            _token(token, entry[token].text, entry)
            for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        answer["details"] = {
            "finish_reason": _reason(choice.finish_reason, choice.stop_reason),
            "generated_tokens": len(tokens),
            "seed": ask.request.params.seed,
            "prefill": [
                {"id": token, "text": entry[token].text, "logprob": entry[token].logprob}
                if entry
                else {"id": token, "text": ask.first, "logprob": None}
                for token, entry in zip(ask.prefill, result.prompt_logprobs, strict=True)
            ],
            "tokens": tokens,
        }
        if ask.top:
            answer["details"]["top_tokens"] = [_top(entry, ask.top) for entry in choice.logprobs]
    return answer


def _top(entry: Mapping[int, Logprob], most: int) -> list[Json]:
    """Return the most likely tokens of a position, the best first."""
    return [_token(one.token_id, one.text, entry) for one in by_rank(entry, most)]


async def _events(handler: LLMHandler, ask: _Ask) -> AsyncGenerator[bytes, None]:
    texts: list[str] = []
    count = 0
    async with aclosing(handler.generate(ask.request)) as deltas:
        async for delta in deltas:
            refuse_cancelled(delta)
            if delta.opens:
                yield b""
            if delta.index:  # with best_of, only the first choice is streamed
                continue
            texts.append(delta.text)
            last = len(delta.token_ids) - 1
            for position, token in enumerate(delta.token_ids):
                count += 1
                end = delta.finish_reason is not None and position == last
                # A delta may hold several tokens but has one text; the last token gets it.
                text = delta.text if position == last else ""
                entry = delta.logprobs[position]
                top = {"top_tokens": _top(entry, ask.top)} if ask.top else {}
                yield event(
                    {
                        "index": count,
                        "token": _token(token, text, entry),
                        **top,
                        "generated_text": ask.full + "".join(texts) if end else None,
                        "details": _details(delta, count, ask.request) if end else None,
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
    handler = await service_of(request).embedder(None)
    if isinstance(handler, EncoderHandler):
        return json_response(tei.info(handler))
    facts = handler.info
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
