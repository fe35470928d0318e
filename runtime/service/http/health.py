"""Whether the service lives, whether it takes requests, and how it does."""

from __future__ import annotations

import importlib.metadata

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .service import HttpService, service_of


async def live(request: Request) -> Response:
    """``GET /health/live``: 200 while the process answers."""
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """``GET /health`` and ``/health/ready``: 200 once the models are loaded, until the service stops."""
    return Response(status_code=200 if service_of(request).models.ready else 503)


async def version(request: Request) -> Response:
    """``GET /version``."""
    return JSONResponse({"version": importlib.metadata.version("carryall")})


async def metrics(request: Request) -> Response:
    """``GET /metrics``: for Prometheus."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def routes(service: HttpService) -> list[Route]:
    """The endpoints."""
    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/ping", ready),
        Route("/version", version),
        Route("/metrics", metrics),
    ]
