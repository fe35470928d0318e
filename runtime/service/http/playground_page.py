"""The chat page at ``/``: one HTML file, without a build step and without external assets."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .service import HttpService

_PAGE = Path(__file__).parent / "playground" / "index.html"


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own script and style and this service."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def routes(service: HttpService) -> list[Route]:
    """Return the route of the page, or no route with ``--no-playground``."""
    if not service.config.playground:
        return []
    text = _PAGE.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(text), "X-Content-Type-Options": "nosniff"}

    async def page(request: Request) -> Response:
        """Handle ``GET /``: return the chat page."""
        return HTMLResponse(text, headers=headers)

    return [Route("/", page, methods=["GET"])]
