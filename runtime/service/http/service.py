"""The models and settings that all routes use, and helpers to read requests."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from ....errors import RequestError, UnsupportedTaskError
from ....options import shown
from ....plain_json import json_bytes
from ....records import dataclass
from ..access.admission import Admission
from ..core.config import ServerConfig
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler
from ..core.messages import GenerationRequest, refuse_left_out, with_schema_read
from ..core.repository import ModelRepository
from ..kserve.inference import Inference
from ..telemetry.metrics import Metrics
from .bodies import read_object
from .openai.reading import known_fields, text_field

Json = dict[str, Any]
_log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Carryall-Ignored-Fields"


@dataclass(frozen=True, slots=True)
class HttpService:
    """The models, settings, metrics and inference that all routes share."""

    models: ModelRepository
    metrics: Metrics
    inference: Inference

    @property
    def config(self) -> ServerConfig:
        """Return the settings in force."""
        return self.admission.policy.config

    @property
    def admission(self) -> Admission:
        """Return the view of the models that applies the current caller's permissions."""
        return self.inference.models

    async def llm(self, request: HTTPConnection, name: Any, adapter: Any = None) -> LLMHandler:
        """Return the handler of the model ``name``, with one of its adapters; None is the default model.

        A model that is loading is waited for.

        Raises:
            RequestError: a name is not a string.
            UnknownModelError: no model has this name, or the caller may not use it.
        """
        return await self.admission.llm(_model_name(name), adapter=text_field("adapter_id", adapter))

    async def embedder(self, name: Any) -> LLMHandler | EncoderHandler:
        """Return the handler of a model that makes embeddings; see ``llm``."""
        return await self.admission.embedder(_model_name(name))

    async def encoder(self, name: Any) -> EncoderHandler:
        """Return the handler of an encoder; a request without a name means the only one, if there is one.

        Raises:
            UnsupportedTaskError: the model is a language model.
            CarryallError: see ``llm``.
        """
        if not name:
            names = {model.name for model in self.admission.models() if model.kind == "encoder"}
            name = names.pop() if len(names) == 1 else name
        handler = await self.embedder(name)
        if not isinstance(handler, EncoderHandler):
            raise UnsupportedTaskError(f"the model '{handler.name}' is a language model, not an encoder")
        return handler

    async def body(self, request: Request) -> Json:
        """Return the JSON object in the body of a request. See ``read_object`` for errors."""
        return await read_object(request, self.config.max_body_bytes, self.config.body_timeout_seconds)

    async def known_body(self, request: Request, known: Collection[str]) -> tuple[Json, dict[str, str]]:
        """Return the known fields of a body, and a header that lists the ignored fields.

        Raises:
            RequestError: a field is unknown and the service runs with ``--strict``.
        """
        return self.split(await self.body(request), known)

    def split(self, given: Json, known: Collection[str]) -> tuple[Json, dict[str, str]]:
        """Return the known fields of a body, and a header that lists the ignored ones; see ``known_body``."""
        body, unknown = known_fields(given, known, strict=self.config.strict)
        headers: dict[str, str] = {}
        list_ignored(headers, unknown)
        return body, headers

    async def admitted(
        self, asked: GenerationRequest, headers: MutableMapping[str, str]
    ) -> GenerationRequest:
        """Return a request within the service's limits; see ``Admission.admitted``.

        Args:
            asked: the request.
            headers: of the answer; the one that lists ignored fields also lists what the request leaves out.

        Raises:
            InvalidSamplingError: an option is above the service's limit.
            RequestError: something is left out and the service runs with ``--strict``.
        """
        if asked.has_schemas:
            asked = await asyncio.to_thread(with_schema_read, asked)
        if self.config.strict:
            refuse_left_out(asked, "remove it, or start the service without --strict")
        for name in asked.left_out:
            _warn_once(name)
        list_ignored(headers, asked.left_out)
        return self.admission.admitted(asked)


def list_ignored(headers: MutableMapping[str, str], names: Iterable[str]) -> None:
    """Add names to the header that lists what a request has and no one reads."""
    # Clients choose names freely, but a header may hold only printable ASCII.
    listed = headers[IGNORED_HEADER].split(", ") if IGNORED_HEADER in headers else []
    listed += [name.encode("ascii", "replace").decode() for name in names if name.isprintable()]
    if listed:
        headers[IGNORED_HEADER] = ", ".join(dict.fromkeys(listed))[:500]


@functools.lru_cache(maxsize=256)  # bounded, since clients choose the names
def _warn_once(name: str) -> None:
    _log.warning("a request has %s, which is not supported here: it is left out", shown(name))


def _model_name(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise RequestError(f"'model' must be a string, not {shown(given)}")
    return given


def service_of(request: HTTPConnection) -> HttpService:
    """Return the service that the request's application serves."""
    service: HttpService = request.app.state.service
    return service


def with_defaults(handler: LLMHandler, body: Mapping[str, Any]) -> Json:
    """Return the body, with the model's default sampling options for those that it omits."""
    return {**handler.defaults, **{name: value for name, value in body.items() if value is not None}}


def json_response(document: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return a JSON response. NaN and infinite numbers become null."""
    if isinstance(document, JSONResponse):
        return document
    return Response(json_bytes(document), status, headers, "application/json")
