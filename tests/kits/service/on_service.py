"""Work without asyncio, such as a program's, on a service in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from http_serving import http_serving
from null_llm import null_llm


def on_service(work: Callable[[str], Any], **options: Any) -> Any:
    """What ``work`` returns for the address of a service, whose model takes texts alone."""

    async def scenario() -> Any:
        async with null_llm(**options) as llm, http_serving(llm) as served:
            return await asyncio.to_thread(work, served.url)

    return asyncio.run(scenario())
