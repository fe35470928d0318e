"""``GET /openapi.json``: the endpoints as an OpenAPI 3.1 document.

Sampling options come from ``SamplingParams``, and model names from the models that are loaded. Fields are
described as far as they are checked; the service may accept more (docs/serving.md).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....options import Option, declared
from ...types.sampling_params import SamplingParams
from .service import HttpService, json_response, service_of

Json = dict[str, Any]

_TYPES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_WORDS: Json = {"type": "string", "minLength": 1}
_TEXTS: Json = {"anyOf": [_WORDS, {"type": "array", "items": _WORDS, "minItems": 1, "maxItems": 8}]}
_COUNT: Json = {"type": "integer", "minimum": 1, "maximum": 256}
_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT: Json = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "description": _TEXT, "parameters": _OBJECT},
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
    "additionalProperties": False,
}
_ERRORS = {
    400: "The request is invalid.",
    401: "The API key is missing or unknown.",
    403: "Not allowed.",
    404: "There is no such model or object.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    429: "The queue is full, or a limit of the API key is used up.",
    501: "The model cannot do this.",
    503: "The model is loading, or the service is stopping.",
}


def _messages(roles: tuple[str, ...]) -> Json:
    """Return the schema of a list of messages."""
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": _CONTENT},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def _option(option: Option) -> Json | None:
    """Return the schema of a sampling option, or None if JSON cannot describe it."""
    found: list[Json] = [{"enum": list(option.choices)}] if option.choices else []
    for kind in option.kinds:
        if kind not in _TYPES:
            return None
        one: Json = {"type": _TYPES[kind]}
        for name, bound in (
            ("minimum", option.least),
            ("exclusiveMinimum", option.above),
            ("maximum", option.most),
        ):
            if bound is not None and abs(bound) != float("inf"):
                one[name] = bound
        found.append({"type": "array", "items": one} if option.repeated else one)
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    return {**schema, "description": option.help}


def _sampling() -> dict[str, Json]:
    """Return the schemas of the sampling options by name."""
    schemas = {name: _option(option) for name, option in declared(SamplingParams).items()}
    return {name: schema for name, schema in schemas.items() if schema is not None}


def _bodies(llms: Json, embedders: Json) -> dict[str, tuple[dict[str, Json], tuple[str, ...]]]:
    """Return fields and required fields of the body of each POST endpoint."""
    stream = {"stream": _FLAG, "model": llms}
    sampling = {**_sampling(), **stream}
    chat = {
        **{name: schema for name, schema in sampling.items() if name != "logprobs"},
        "messages": _messages(("system", "user", "assistant")),
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"enum": ["auto", "none"]},
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}},
    }
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    anthropic = {
        "messages": _messages(("user", "assistant")),
        "system": _TEXT,
        "max_tokens": _COUNT,
        **stream,
    }
    ollama = {"type": "object", "properties": {"num_predict": _COUNT, "temperature": {"type": "number"}}}
    return {
        "/v1/chat/completions": (chat, ("messages",)),
        "/v1/completions": ({**sampling, "prompt": _TEXTS, "echo": _FLAG}, ("prompt",)),
        "/v1/responses": (
            {"input": _TEXT, "max_output_tokens": _COUNT, "store": _FLAG, **stream},
            ("input",),
        ),
        "/v1/embeddings": (
            {"input": _TEXTS, "encoding_format": {"enum": ["float", "base64"]}, "model": embedders},
            ("input", "model"),
        ),
        "/v1/messages": (anthropic, ("messages", "max_tokens")),
        "/v1/messages/count_tokens": (
            {"messages": anthropic["messages"], "system": _TEXT, "model": llms},
            ("messages",),
        ),
        "/api/chat": ({"messages": chat["messages"], "options": ollama, **stream}, ("messages",)),
        "/api/generate": ({"prompt": _TEXT, "raw": _FLAG, "options": ollama, **stream}, ("prompt",)),
        "/api/embed": ({"input": _TEXTS, "model": embedders}, ("input", "model")),
        "/generate": (
            {"inputs": _TEXT, "parameters": {"type": "object", "properties": {"max_new_tokens": _COUNT}}},
            ("inputs",),
        ),
        "/tokenize": ({"prompt": _TEXT, "add_special_tokens": _FLAG, "model": llms}, ("prompt",)),
        "/detokenize": ({"tokens": tokens, "model": llms}, ("tokens",)),
        "/score": ({"text_1": _TEXTS, "text_2": _TEXTS, "model": embedders}, ("text_1", "text_2", "model")),
        "/rerank": (
            {
                "query": _TEXT,
                "documents": _TEXTS,
                "top_n": _COUNT,
                "return_documents": _FLAG,
                "model": embedders,
            },
            ("query", "documents", "model"),
        ),
    }


_GETS = ("/v1/models", "/api/tags", "/api/version", "/info", "/version", "/v2")  # fmt: skip
_STREAMS: Json = {"text/event-stream": {}, "application/x-ndjson": {}}


def document(llms: list[str], embedders: list[str]) -> Json:
    """Return the OpenAPI document.

    Args:
        llms: the names of language models.
        embedders: the names of models that make embeddings.
    """
    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": _OBJECT}}}
        for status, text in _ERRORS.items()
    }
    json_body = {"application/json": {"schema": _OBJECT}}
    paths: Json = {}
    for path, (fields, required) in _bodies({"enum": llms}, {"enum": embedders}).items():
        schema = {"type": "object", "properties": fields, "required": list(required)}
        done = {
            "description": "The result.",
            "content": {**json_body, **(_STREAMS if "stream" in fields else {})},
        }
        paths[path] = {
            "post": {
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": done, **errors},
            }
        }
    for path in _GETS:
        paths[path] = {
            "get": {
                "operationId": f"get_{path.strip('/').replace('/', '_')}",
                "responses": {"200": done, **errors},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "carryall", "version": importlib.metadata.version("carryall")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


async def openapi(request: Request) -> Response:
    """Handle ``GET /openapi.json``."""
    ready = [one for one in service_of(request).admission.models() if one.state == "ready"]
    llms = sorted({name for one in ready if one.kind == "llm" for name in (one.name, *one.loras)})
    encoders = sorted({one.name for one in ready if one.kind == "encoder"})
    embedders = encoders or sorted({one.name for one in ready if one.kind == "llm"})
    return json_response(document(llms, embedders))


def routes(service: HttpService) -> list[Route]:
    """Return the route."""
    return [Route("/openapi.json", openapi)]
