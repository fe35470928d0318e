"""``POST /v1/prefill`` of ``serve --role prefill``: compute a prompt for a decode service.

Its KV goes to the shared tier, where the decode service finds it; the answer says that it is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ....errors import RequestError, ServiceUnavailableError
from ....options import shown
from ...engine.requests.prefill_client import PREFILL_PATH
from ...types.sampling_params import SamplingParams
from ..access.admission import Admission
from ..core.messages import GenerationRequest
from .openai.reading import is_token_ids, text_field
from .service import json_response, service_of
from .sse import while_connected

_FIELDS = frozenset({"prompt", "cache_salt", "identity", "timeout"})
_LONGEST_SECONDS = 3600.0


class PrefillService:
    """The endpoint of a prefill server, as a part of the service."""

    def routes(self) -> Sequence[BaseRoute]:
        """Return the route of the endpoint."""
        return [Route(PREFILL_PATH, prefill, methods=["POST"])]

    async def start(self, models: Admission) -> None:
        """Do nothing: requests begin the work."""

    async def stop(self) -> None:
        """Do nothing: requests are drained with all others."""


async def prefill(request: Request) -> Response:
    """Compute the KV of ``prompt``, and answer when the shared tier has it.

    Raises:
        RequestError: a field is missing or invalid.
        HTTPException: the caller has another model or layout of KV (409).
        ServiceUnavailableError: the tier does not take the KV in time.
    """
    service = service_of(request)
    body, headers = await service.known_body(request, _FIELDS)
    prompt, seconds = body.get("prompt"), body.get("timeout")
    if not is_token_ids(prompt) or not prompt:
        raise RequestError("'prompt' must be a list of token ids")
    if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_SECONDS:
        raise RequestError(f"'timeout' must be seconds, at most {_LONGEST_SECONDS:g}, not {shown(seconds)}")
    handler = await service.llm(request, None)
    engine = handler.llm.engine
    if body.get("identity") != engine.kv_identity:
        raise HTTPException(409, f"the model '{handler.name}' here has other weights or another layout of KV")
    asked = GenerationRequest(
        prompt=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=1),
        cache_salt=text_field("cache_salt", body.get("cache_salt")),
        timeout=float(seconds),
    )

    async def compute() -> bool:
        end = time.monotonic() + seconds
        async with aclosing(handler.generate(asked)) as deltas:
            async for _ in deltas:
                pass
        return await asyncio.to_thread(engine.flush_tiers, max(0.0, end - time.monotonic()))

    if not await while_connected(request.receive, compute()):
        raise ServiceUnavailableError("the shared tier did not take the KV in time")
    return json_response({"prompt_tokens": len(prompt)}, headers)
