"""``GET /openapi.json``: the routes of the application as an OpenAPI document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .schemas.document import ModelNames, Operation, document
from .service import HttpService, json_response, service_of


def operations(routes: Iterable[BaseRoute]) -> Iterator[Operation]:
    """Yield the methods of routes that do something, with the first line of each endpoint's docstring."""
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            # Docstrings of endpoints have the form "Handle ``GET /path``: what it does."
            what = (inspect.getdoc(route.endpoint) or "").partition("\n")[0].partition(": ")[2]
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Operation(
                    re.sub(r":\w+}", "}", route.path), method.lower(), what[:1].upper() + what[1:]
                )


async def openapi(request: Request) -> Response:
    """Handle ``GET /openapi.json``: return this document."""
    ready = [status for status in service_of(request).admission.models() if status.state == "ready"]
    llms = sorted({name for status in ready if status.kind == "llm" for name in (status.name, *status.loras)})
    encoders = sorted({status.name for status in ready if status.kind == "encoder"})
    embedders = encoders or sorted({status.name for status in ready if status.kind == "llm"})
    names = ModelNames(llms, embedders, sorted({status.name for status in ready}))
    return json_response(document(operations(request.app.routes), names))


def routes(service: HttpService) -> list[Route]:
    """Return the route."""
    return [Route("/openapi.json", openapi)]
