"""The endpoint ``/infill`` of llama.cpp's server, which editors ask for the text at the cursor.

See https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError
from ....options import shown
from ...text.infill import Infill
from ..core.messages import GenerationRequest, Usage, refuse_cancelled
from .openai.reading import bool_field, generation_request, text_field
from .service import HttpService, json_response, service_of, with_defaults
from .sse import event, streamed, while_connected

Json = dict[str, Any]

# llama.cpp's names of options, and ours.
_OPTIONS = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty",
         "frequency_penalty", "repetition_penalty", "ignore_eos", "grammar", "logit_bias")  # fmt: skip
_IGNORED = ("cache_prompt", "samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms", "response_fields",
            "id_slot", "n_keep")  # fmt: skip
_KNOWN = frozenset({"model", "input_prefix", "input_suffix", "input_extra", "prompt", "stream",
                    *_OPTIONS, *_SAME, *_IGNORED})  # fmt: skip
_MOST_TOKENS = 128  # of a request that sets no ``n_predict``


async def infill(request: Request) -> Response:
    """Handle ``POST /infill``: generate the text between ``input_prefix`` and ``input_suffix``.

    ``prompt`` is text of the gap that is there already; ``input_extra`` has other files.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, _KNOWN)
    handler = await service.llm(request, body.get("model"))
    stream = bool_field("stream", body.get("stream") or False)
    asked = await service.admitted(read_body(with_defaults(handler, body)), headers)
    model, begun = handler.name, time.monotonic()
    if not stream:
        result = await while_connected(request.receive, handler.complete(asked))
        choice = result.choices[0]
        reason = choice.finish_reason, choice.stop_reason
        end = _end(choice.text, *reason, result.usage, model, begun)
        return json_response(end, headers)

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(handler.generate(asked)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                if delta.opens:
                    yield b""
                elif delta.usage is None:
                    yield event({"content": delta.text, "stop": False})
                else:
                    reason = delta.finish_reason, delta.stop_reason
                    yield event(_end(delta.text, *reason, delta.usage, model, begun))

    return streamed(request, pieces(), headers=headers)


def read_body(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the generation request for a body.

    Raises:
        RequestError: a field is invalid.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    prefix, suffix, begun = (
        text_field(name, fields.get(name)) or "" for name in ("input_prefix", "input_suffix", "prompt")
    )
    options: Json = {"max_tokens": _MOST_TOKENS}
    options |= {name: fields[name] for name in _SAME if name in fields}
    options |= {ours: fields[theirs] for theirs, ours in _OPTIONS.items() if theirs in fields}
    if grammar := options.pop("grammar", None):
        options["structured_output"] = {"grammar": grammar}
    return generation_request(
        Infill(prefix + begun, suffix, _files(fields.get("input_extra") or [])), options
    )


def _files(given: Any) -> tuple[tuple[str, str], ...]:
    files = []
    for entry in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        name, text = (entry.get(key) for key in ("filename", "text")) if isinstance(entry, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise RequestError(
                "'input_extra' must be a list of objects with the texts 'filename' and 'text', not "
                f"{shown(entry)}"
            )
        files.append((name, text))
    return tuple(files)


def _end(
    text: str, reason: str | None, stop: str | int | None, usage: Usage, model: str, begun: float
) -> Json:
    """Return the last object of a stream, which is the whole answer without one."""
    kind = "limit" if reason == "length" else ("word" if isinstance(stop, str) else "eos")
    total = 1000 * (time.monotonic() - begun)
    return {
        "content": text,
        "stop": True,
        "stop_type": kind,
        "stopping_word": stop if isinstance(stop, str) else "",
        "model": model,
        "truncated": False,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "timings": {
            "prompt_n": usage.prompt_tokens - usage.cached_tokens,
            "prompt_ms": 1000 * usage.prompt_seconds,
            "predicted_n": usage.completion_tokens,
            "predicted_ms": 1000 * usage.decode_seconds or max(0.0, total - 1000 * usage.prompt_seconds),
        },
    }


def routes(service: HttpService) -> list[Route]:
    """Return the route."""
    return [Route("/infill", infill, methods=["POST"])]
