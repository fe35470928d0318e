"""The HTTP application: all routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ....errors import CarryallError
from ..core.repository import ModelRepository
from ..kserve.inference import Inference
from ..kserve.tensor_metrics import TensorMetrics
from ..telemetry.device_metrics import DeviceMetrics
from ..telemetry.metrics import Metrics
from . import (
    anthropic,
    audio,
    health,
    infill,
    kserve,
    ollama,
    openai_api,
    openapi,
    playground_page,
    responses_api,
    tei,
    tgi,
    utility,
)
from .errors import error_response
from .middleware import wrapped
from .service import HttpService
from .sse import ClientGone

# A request tries the routes in this order: those of most requests come first.
_ROUTERS = (
    *(
        openai_api,
        responses_api,
        anthropic,
        ollama,
        tgi,
        health,
        playground_page,
        utility,
        infill,
        tei,
        kserve,
        audio,
    ),
    openapi,
)


def make_app(
    models: ModelRepository,
    inference: Inference,
    further: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        models: the models to serve.
        inference: runs tensor requests, with the access control of all transports.
        further: additional routes.
    """
    metrics = Metrics(models, [TensorMetrics(models, inference.statistics), DeviceMetrics(models)])
    service = HttpService(models, metrics, inference)
    handlers: dict[Any, Any] = {
        CarryallError: error_response,
        HTTPException: error_response,
        ClientGone: _client_gone,
        Exception: error_response,
    }
    routes = [route for router in _ROUTERS for route in router.routes(service)]
    app = Starlette(routes=[*routes, *further], exception_handlers=handlers)
    app.state.service = service
    return wrapped(app, inference.models.policy)


async def _client_gone(request: Any, error: Exception) -> Any:
    return error_response(request, HTTPException(499, "the client closed its connection"))
