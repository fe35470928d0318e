"""The Open Inference Protocol (KServe v2) over HTTP, with Triton's extensions such as ``generate``."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....errors import RequestError, UnsupportedTaskError
from ....options import shown
from ...process.large_json import SMALL
from ..core.model_entry import ModelState
from ..kserve.documents import (
    InferDocument,
    config_document,
    facts_document,
    listed,
    read_object,
    response_head,
    statistics_document,
)
from ..kserve.inference import EXTENSIONS, Inference
from ..kserve.messages import InferenceRequest, InferenceResponse, TensorFacts
from ..kserve.shared_memory import SharedRegion
from ..kserve.tensors import Array, of_bytes
from ..kserve.text import INPUTS
from .bodies import read_bytes
from .service import HttpService, json_response, service_of
from .sse import event, streamed, while_connected

Json = dict[str, Any]

JSON_SIZE = "Inference-Header-Content-Length"
STATES: dict[ModelState, str] = {
    "ready": "READY",
    "loading": "LOADING",
    "unloading": "UNLOADING",
    "unloaded": "UNAVAILABLE",
    "failed": "UNAVAILABLE",
}


def _inference(request: Request) -> Inference:
    return service_of(request).inference


def _model(request: Request) -> tuple[str, str]:
    """Return the model name and version from the path; the version is empty if absent."""
    return request.path_params["model"], request.path_params.get("version", "")


async def _body(request: Request) -> bytes:
    config = service_of(request).config
    return await read_bytes(request, config.max_body_bytes, config.body_timeout_seconds)


async def _document(request: Request) -> Json:
    """Return the JSON object in the body; a large one is parsed in a thread, beside running streams."""
    body = await _body(request)
    return read_object(body) if len(body) <= SMALL else await asyncio.to_thread(read_object, body)


async def live(request: Request) -> Response:
    """Handle ``GET /v2/health/live``: return 200 while the process runs."""
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """Handle ``GET /v2/health/ready``: return 200 once the models are loaded, else 503."""
    return Response(status_code=200 if _inference(request).models.ready else 503)


async def server(request: Request) -> Response:
    """Handle ``GET /v2``: return name, version and extensions of the server."""
    version = importlib.metadata.version("carryall")
    return json_response({"name": "carryall", "version": version, "extensions": list(EXTENSIONS)})


async def model_ready(request: Request) -> Response:
    """Handle ``GET /v2/models/{model}/ready``: return 200 if the model accepts requests, else 503."""
    status = _inference(request).models.find(*_model(request))
    return Response(status_code=200 if status.state == "ready" else 503)


async def metadata(request: Request) -> Response:
    """Handle ``GET /v2/models/{model}``: return the inputs and outputs of a model."""
    return json_response(facts_document(_inference(request).facts(*_model(request))))


async def model_config(request: Request) -> Response:
    """Handle ``GET /v2/models/{model}/config``: return the configuration of a model."""
    return json_response(config_document(_inference(request).facts(*_model(request))))


async def statistics(request: Request) -> Response:
    """Handle ``GET /v2/models/{model}/stats`` and ``/v2/models/stats``: return counts and durations."""
    inference = _inference(request)
    named = "model" in request.path_params
    statuses = [inference.models.find(*_model(request))] if named else inference.models.models()
    stats = [
        statistics_document(one.name, one.version, inference.statistics.of(one.name, one.version))
        for one in statuses
    ]
    return json_response({"model_stats": stats})


async def infer(request: Request) -> Response:
    """Handle ``POST /v2/models/{model}/infer``: run a model once."""
    inference = _inference(request)
    body = await _body(request)
    size = _json_size(request)
    read = functools.partial(InferDocument, *_model(request), body, size, inference.memory)
    document = read() if (size or len(body)) <= SMALL else await asyncio.to_thread(read)
    answer = await while_connected(request.receive, inference.run(document.request))
    content, header = document.response(answer)
    if header is None:
        return Response(content, media_type="application/json")
    return Response(content, headers={JSON_SIZE: str(header)}, media_type="application/octet-stream")


def _json_size(request: Request) -> int | None:
    text = request.headers.get(JSON_SIZE)
    if text is not None and not text.isdecimal():
        raise RequestError(f"the header {JSON_SIZE} must be an integer of at least 0, not {shown(text)}")
    return None if text is None else int(text)


async def generate(request: Request) -> Response:
    """Handle ``POST /v2/models/{model}/generate``: return the complete text."""
    wanted = _text_request(request, await _document(request), stream=False)
    answer = await while_connected(request.receive, _inference(request).run(wanted))
    return json_response(_text_document(answer))


async def generate_stream(request: Request) -> Response:
    """Handle ``POST /v2/models/{model}/generate_stream``: stream the text as server-sent events."""
    wanted = _text_request(request, await _document(request), stream=True)

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(_inference(request).responses(wanted)) as responses:
            async for response in responses:
                documents = _stream_documents(_text_document(response)) if response.outputs else ()
                yield b"".join(map(event, documents))

    return streamed(request, pieces())


def _stream_documents(document: Json) -> Iterator[Json]:
    """Yield a part of a stream; with ``details``, once for each token, and the text with the last one."""
    details = document.pop("details", None)
    if details is None:
        yield document
        return
    *first, last = details["logprobs"] or [None]
    for token in first:
        yield {**document, "text_output": "", "details": {"finish_reason": None, "token": token}}
    yield {**document, "details": {"finish_reason": details["finish_reason"], "token": last}}


def _text_request(request: Request, document: Json, *, stream: bool) -> InferenceRequest:
    """Return a request for text.

    Fields with the name of an input become tensors. All others are sampling options. Unless the document
    says otherwise, the output text does not repeat the prompt.
    """
    name, version = _model(request)
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError("'parameters' must be an object")
    fields = {"exclude_input_in_output": True, **parameters}
    fields |= {field: value for field, value in document.items() if field not in ("id", "parameters")}
    if fields.pop("stream", stream) is not stream:
        raise RequestError("'stream' must be true in generate_stream, and false in generate")
    facts = {one.name: one for one in INPUTS}
    inputs = {field: _input(facts[field], value) for field, value in fields.items() if field in facts}
    return InferenceRequest(
        model=name,
        version=version,
        id=str(document.get("id", "")),
        parameters={field: value for field, value in fields.items() if field not in facts},
        inputs={**inputs, "stream": np.array([stream])},
    )


def _input(facts: TensorFacts, value: Any) -> Array:
    texts = value if isinstance(value, list) and facts.shape != [1] else [value]
    if facts.datatype == "BYTES" and all(isinstance(text, str) for text in texts):
        return of_bytes([text.encode("utf-8", "surrogatepass") for text in texts])
    if isinstance(value, bool) and facts.datatype == "BOOL":
        return np.array([value])
    kind = "true or false" if facts.datatype == "BOOL" else "a string"
    kinds = kind if facts.shape == [1] else f"{kind} or a list of them"
    raise RequestError(f"'{facts.name}' must be {kinds}, not {shown(value)}")


def _text_document(response: InferenceResponse) -> Json:
    """Return a response as JSON. An output of 1 element becomes a scalar, a larger one a list."""
    values = {name: listed(name, array) for name, array in response.outputs.items()}
    if "details" in values:
        values["details"] = [json.loads(one) for one in values["details"]]
    return {
        **response_head(response),
        **{name: one[0] if len(one) == 1 else one for name, one in values.items()},
    }


async def index(request: Request) -> Response:
    """Handle ``POST /v2/repository/index``: list all models, or only ready ones with ``ready``."""
    only_ready = (await _document(request)).get("ready", False)
    statuses = _inference(request).models.models()
    return json_response(
        [
            {"name": one.name, "version": one.version, "state": STATES[one.state], "reason": one.reason}
            for one in statuses
            if one.state == "ready" or not only_ready
        ]
    )


async def load(request: Request) -> Response:
    """Handle ``POST /v2/repository/models/{model}/load``: load a model."""
    if parameters := (await _document(request)).get("parameters"):
        raise UnsupportedTaskError(f"a load request cannot set parameters; remove {parameters}")
    await _inference(request).models.load(request.path_params["model"])
    return Response(status_code=200)


async def unload(request: Request) -> Response:
    """Handle ``POST /v2/repository/models/{model}/unload``: unload a model."""
    await _inference(request).models.unload(request.path_params["model"])
    return Response(status_code=200)


async def regions(request: Request) -> Response:
    """Handle ``GET /v2/systemsharedmemory[/region/{region}]/status``: list registered regions."""
    found = _inference(request).memory.regions(request.path_params.get("region", ""))
    return json_response([_region(one) for one in found])


def _region(region: SharedRegion) -> Json:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}


async def register(request: Request) -> Response:
    """Handle ``POST /v2/systemsharedmemory/region/{region}/register``: register a region."""
    document = await _document(request)
    key, offset, size = document.get("key"), document.get("offset", 0), document.get("byte_size")
    if not (isinstance(key, str) and type(offset) is int and type(size) is int and min(offset, size) >= 0):
        raise RequestError("'key' must be a string; 'offset' and 'byte_size' must be integers of at least 0")
    _inference(request).memory.register(request.path_params["region"], key, offset, size)
    return Response(status_code=200)


async def unregister(request: Request) -> Response:
    """Handle ``POST /v2/systemsharedmemory[/region/{region}]/unregister``: unregister 1 region or all."""
    _inference(request).memory.unregister(request.path_params.get("region", ""))
    return Response(status_code=200)


_MODEL_ENDPOINTS: Mapping[str, tuple[str, Any]] = {
    "": ("GET", metadata),
    "/ready": ("GET", model_ready),
    "/config": ("GET", model_config),
    "/stats": ("GET", statistics),
    "/infer": ("POST", infer),
    "/generate": ("POST", generate),
    "/generate_stream": ("POST", generate_stream),
}


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    memory = "/v2/systemsharedmemory"
    return [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models/stats", statistics),
        *(
            Route(f"/v2/models/{{model}}{version}{path}", endpoint, methods=[method])
            for version in ("", "/versions/{version}")
            for path, (method, endpoint) in _MODEL_ENDPOINTS.items()
        ),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{model}/unload", unload, methods=["POST"]),
        Route(f"{memory}/status", regions),
        Route(f"{memory}/region/{{region}}/status", regions),
        Route(f"{memory}/region/{{region}}/register", register, methods=["POST"]),
        Route(f"{memory}/region/{{region}}/unregister", unregister, methods=["POST"]),
        Route(f"{memory}/unregister", unregister, methods=["POST"]),
    ]
