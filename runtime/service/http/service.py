"""What every route works with: the models, the settings, and how a request is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....errors import RequestError
from ....plain_json import plain_json
from ..core.admission import CALLER, Admission
from ..core.api_keys import Caller
from ..core.config import ServerConfig
from ..core.handler import LLMHandler
from ..core.messages import GenerationRequest
from ..core.metrics import Metrics
from ..core.repository import ModelRepository
from ..kserve.inference import Inference
from .bodies import read_object
from .openai.reading import known_fields

Json = dict[str, Any]
IGNORED_HEADER = "X-Carryall-Ignored-Fields"


@dataclass(frozen=True, slots=True)
class HttpService:
    """The models and the settings."""

    models: ModelRepository
    config: ServerConfig
    metrics: Metrics
    inference: Inference

    @property
    def admission(self) -> Admission:
        """The models as the present caller sees them."""
        return self.inference.models

    def llm(self, request: Request, name: Any) -> LLMHandler:
        """The handler of the model that a request names.

        Raises:
            RequestError: the name is no text.
            UnknownModelError: there is none of that name, or none that the caller may use.
        """
        if name is not None and not isinstance(name, str):
            raise RequestError(f"'model' must be a text, not {name!r}")
        return self.admission.llm(name)

    async def body(self, request: Request) -> Json:
        """A request's JSON object; see ``read_object``."""
        return await read_object(request, self.config.max_body_bytes, self.config.body_timeout_seconds)

    async def known_body(self, request: Request, known: Collection[str]) -> tuple[Json, dict[str, str]]:
        """A request's fields that mean something, and the header that tells which were ignored.

        Raises:
            RequestError: fields are unknown, and the service is strict.
        """
        body, unknown = known_fields(await self.body(request), known, strict=self.config.strict)
        # Names are the client's own; a header has only printable ASCII.
        names = ", ".join(name.encode("ascii", "replace").decode() for name in unknown if name.isprintable())
        return body, {IGNORED_HEADER: names[:500]} if names else {}

    def admitted(self, request: Request, asked: GenerationRequest) -> GenerationRequest:
        """What a request asks for, in its caller's name.

        Raises:
            InvalidSamplingError: an option is beyond the service's limits.
        """
        return self.admission.admitted(asked)


def service_of(request: Request) -> HttpService:
    """The service that the application of a request was made for."""
    service: HttpService = request.app.state.service
    return service


def caller_of(request: Request) -> Caller | None:
    """Whose key a request has; None where none is needed."""
    return CALLER.get()


def with_defaults(handler: LLMHandler, body: Mapping[str, Any]) -> Json:
    """The body, with the model's own sampling options where it leaves them out."""
    return {**handler.model.defaults, **{name: value for name, value in body.items() if value is not None}}


def json_response(document: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A JSON document; numbers that are not finite become null."""
    if isinstance(document, JSONResponse):
        return document
    return Response(plain_json(document), status, headers, "application/json")
