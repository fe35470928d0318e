"""Endpoints for liveness, readiness, version and metrics."""

from __future__ import annotations

import importlib.metadata

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .service import HttpService, service_of


async def live(request: Request) -> Response:
    """Handle ``GET /health/live``: return 200 while the process runs."""
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """Handle ``GET /health``, ``/health/ready``, ``/ping``: return 200 if the models are loaded, else 503."""
    return Response(status_code=200 if service_of(request).models.ready else 503)


async def version(request: Request) -> Response:
    """Handle ``GET /version``: return the version of carryall."""
    return JSONResponse({"version": importlib.metadata.version("carryall")})


async def metrics(request: Request) -> Response:
    """Handle ``GET /metrics``: return metrics in Prometheus format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/health", ready),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/ping", ready),
        Route("/version", version),
        Route("/metrics", metrics),
    ]
