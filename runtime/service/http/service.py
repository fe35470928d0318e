"""What every route works with: the models, the settings, and how a request is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....errors import InvalidSamplingError, RequestError, UnknownModelError
from ....plain_json import plain_json
from ...types.sampling_params import SamplingParams
from ..core.api_keys import Caller
from ..core.config import ServerConfig
from ..core.handler import LLMHandler
from ..core.messages import GenerationRequest
from ..core.repository import ModelRepository
from .bodies import read_object
from .openai.reading import known_fields

Json = dict[str, Any]
IGNORED_HEADER = "X-Carryall-Ignored-Fields"


@dataclass(frozen=True, slots=True)
class HttpService:
    """The models and the settings."""

    models: ModelRepository
    config: ServerConfig

    def llm(self, request: Request, name: Any) -> LLMHandler:
        """The handler of the model that a request names.

        Raises:
            RequestError: the name is no text.
            UnknownModelError: there is none of that name, or none that the caller may use.
        """
        handler = self._llm(name)
        caller = caller_of(request)
        if caller is not None and not caller.may_use(handler.model.info.model):
            raise UnknownModelError(f"there is no model '{name}' that this API key may use")
        return handler

    def _llm(self, name: Any) -> LLMHandler:
        if name is not None and not isinstance(name, str):
            raise RequestError(f"'model' must be a text, not {name!r}")
        try:
            return self.models.llm(name)
        except UnknownModelError:
            if not self.config.any_model_name:
                raise
            return self.models.llm(None)

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
        self.check(asked.params)
        caller = caller_of(request)
        return asked if caller is None else dataclasses.replace(asked, tenant=caller.name)

    def check(self, params: SamplingParams) -> None:
        """Make sure that sampling options are within the service's limits.

        Raises:
            InvalidSamplingError: one is not.
        """
        limits = {
            "n": (params.num_samples, self.config.max_choices),
            "logprobs": (params.logprobs, self.config.max_logprobs),
            "prompt_logprobs": (params.prompt_logprobs, self.config.max_logprobs),
        }
        for name, (value, most) in limits.items():
            if value is not None and value > most:
                raise InvalidSamplingError(f"{name} is {value}, but this service allows at most {most}")


def service_of(request: Request) -> HttpService:
    """The service that the application of a request was made for."""
    service: HttpService = request.app.state.service
    return service


def caller_of(request: Request) -> Caller | None:
    """Whose key a request has; None where none is needed."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return caller


def with_defaults(handler: LLMHandler, body: Mapping[str, Any]) -> Json:
    """The body, with the model's own sampling options where it leaves them out."""
    return {**handler.model.defaults, **{name: value for name, value in body.items() if value is not None}}


def json_response(document: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A JSON document; numbers that are not finite become null."""
    if isinstance(document, JSONResponse):
        return document
    return Response(plain_json(document), status, headers, "application/json")
