"""The HTTP application: all routes, and what stands in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ....errors import CarryallError
from ..core.api_keys import ApiKeys
from ..core.config import ServerConfig
from ..core.metrics import Metrics
from ..core.repository import ModelRepository
from ..kserve.inference import Inference
from . import anthropic, health, kserve, ollama, openai_api, playground_page, responses_api, tgi, utility
from .errors import error_response
from .middleware import wrapped
from .service import HttpService
from .sse import ClientGone

_ROUTERS = (playground_page, health, openai_api, responses_api, anthropic, ollama, tgi, utility, kserve)


def make_app(
    models: ModelRepository,
    config: ServerConfig,
    further: Sequence[BaseRoute] = (),
    inference: Inference | None = None,
) -> ASGIApp:
    """The application.

    Args:
        models: that are served.
        config: limits and options.
        further: routes of other parts of the package.
        inference: the Open Inference Protocol, shared with other transports; None makes one.

    Raises:
        UsageError: the file with the API keys cannot be read.
    """
    service = HttpService(models, config, Metrics(models), inference or Inference.of(models, config))
    handlers: dict[Any, Any] = {
        CarryallError: error_response,
        HTTPException: error_response,
        ClientGone: _nobody_listens,
        Exception: error_response,
    }
    routes = [route for router in _ROUTERS for route in router.routes(service)]
    app = Starlette(routes=[*routes, *further], exception_handlers=handlers)
    app.state.service = service
    return wrapped(app, config, ApiKeys(config.api_keys) if config.api_keys else None)


async def _nobody_listens(request: Any, error: Exception) -> Any:
    return error_response(request, HTTPException(499, "the client closed its connection"))
