"""The OpenAPI 3.1 document of an application, made from its operations."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

from .....records import dataclass
from .bodies import Json, bodies

_ERRORS = {
    400: "The request is invalid.",
    401: "The API key is missing or unknown.",
    403: "Not allowed.",
    404: "There is no such model or object.",
    405: "The path has no such method.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    429: "The queue is full, or a limit of the API key is used up.",
    501: "The model cannot do this.",
    503: "The model is loading, or the service is stopping.",
}
_JSON, _EVENTS, _BYTES = "application/json", "text/event-stream", "application/octet-stream"
# The media types of responses that are not only JSON; none means that the body is empty.
_MEDIA: dict[tuple[str, str], tuple[str, ...]] = {
    ("get", "/"): ("text/html",),
    ("get", "/metrics"): ("text/plain",),
    ("get", "/v1/files/{id}/content"): (_BYTES,),
    ("post", "/v1/audio/transcriptions"): (_JSON, _EVENTS, "text/plain"),
    ("post", "/v1/audio/translations"): (_JSON, _EVENTS, "text/plain"),
    ("get", "/v1/responses/{id}"): (_JSON, _EVENTS),
    **{("get", path): () for path in ("/health", "/health/live", "/health/ready", "/ping")},
    **{("get", f"/v2/{path}"): () for path in ("health/live", "health/ready", "models/{model}/ready")},
    **{
        ("post", f"/v2/{path}"): ()
        for path in (
            *("repository/models/{model}/load", "repository/models/{model}/unload"),
            *("systemsharedmemory/region/{region}/register", "systemsharedmemory/region/{region}/unregister"),
            "systemsharedmemory/unregister",
        )
    },
    ("post", "/v1/load_lora_adapter"): ("text/plain",),
    ("post", "/v1/unload_lora_adapter"): ("text/plain",),
    ("post", "/v2/models/{model}/infer"): (_JSON, _BYTES),
    ("post", "/v2/models/{model}/generate_stream"): (_EVENTS,),
    ("post", "/generate_stream"): (_EVENTS,),
    ("post", "/api/chat"): (_JSON, "application/x-ndjson"),
    ("post", "/api/generate"): (_JSON, "application/x-ndjson"),
    ("post", "/api/pull"): (_JSON, "application/x-ndjson"),
}
_QUERIES: dict[tuple[str, str], dict[str, Json]] = {
    ("get", "/v1/responses/{id}"): {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": -1},
    },
}
_FILE: Json = {"type": "string", "format": "binary"}
_UPLOAD: Json = {
    "type": "object",
    "properties": {"file": _FILE, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}
_SOUND: Json = {
    "type": "object",
    "properties": {
        "file": _FILE,
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": ["json", "text", "srt", "verbose_json", "vtt"]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "num_beams": {"type": "integer", "minimum": 1, "maximum": 16},
        "stream": {"type": "boolean"},
    },
    "required": ["file"],
}
_SPOKEN: Json = {**_SOUND, "properties": {**_SOUND["properties"], "language": {"type": "string"}}}
# Bodies that are forms, by path.
_FORMS: dict[str, Json] = {
    "/v1/files": _UPLOAD,
    "/v1/audio/transcriptions": _SPOKEN,
    "/v1/audio/translations": _SOUND,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Args:
        path: the path, with parameters such as ``{model}``.
        method: the method in lower case.
        summary: what it does, in one sentence.
    """

    path: str
    method: str
    summary: str


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that requests may use.

    Args:
        llms: language models and their adapters.
        embedders: models that make embeddings.
        models: all models.
    """

    llms: list[str]
    embedders: list[str]
    models: list[str]


def document(operations: Iterable[Operation], names: ModelNames) -> Json:
    """Return the OpenAPI document of the operations."""
    schemas = bodies(_one_of(names.llms), _one_of(names.embedders))
    paths: Json = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = _described(one, schemas, names.models)
    return {
        "openapi": "3.1.0",
        "info": {"title": "carryall", "version": importlib.metadata.version("carryall")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: Operation, schemas: dict[str, Json], models: list[str]) -> Json:
    plain = operation.path.replace("/versions/{version}", "")
    words = re.findall(r"\w+", operation.path)
    described: Json = {"operationId": "_".join([operation.method, *words]), "summary": operation.summary}
    parameters = [_parameter(name, models) for name in re.findall(r"{(\w+)}", operation.path)]
    queries = _QUERIES.get((operation.method, plain), {})
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
    if parameters:
        described["parameters"] = parameters
    media = _MEDIA.get((operation.method, plain), (_JSON,))
    if operation.method == "post" and plain in _FORMS:
        schema = _FORMS[plain]
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    elif operation.method == "post" and plain in schemas:
        schema = schemas[plain]
        described["requestBody"] = {
            "required": bool(schema["required"]),
            "content": {_JSON: {"schema": schema}},
        }
        if media == (_JSON,) and "stream" in schema["properties"]:
            media = (_JSON, _EVENTS)
    return described | {"responses": _responses(media)}


def _parameter(name: str, models: list[str]) -> Json:
    schema: Json = _one_of(models) if name == "model" else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _one_of(names: list[str]) -> Json:
    """Return the schema of a name; before any model is ready, every name is possible."""
    return {"type": "string", "enum": names} if names else {"type": "string"}


def _responses(media: tuple[str, ...]) -> Json:
    body = {_JSON: {"schema": {"type": "object"}}}
    responses: Json = {str(code): {"description": text, "content": body} for code, text in _ERRORS.items()}
    if not media:  # probes
        del responses["503"]["content"]
    done: Json = {"description": "The result."}
    if media:
        done["content"] = {one: {} for one in media}
    return {"200": done, **responses}
