"""SIGHUP reloads keys, certificates and settings of a running service."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from api_keys import key_file
from grpc_serving import repository
from null_llm import null_llm

from carryall.errors import UsageError
from carryall.runtime.service.core.config import ServerConfig
from carryall.runtime.service.serve import Addresses, serve

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")


@pytest.fixture
def harmless() -> Iterator[None]:
    """Make SIGTERM and SIGHUP harmless for the test's own process."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.long
def test_hangup_reloads_keys_and_safe_settings(
    harmless: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file(tmp_path, a="")
    config = ServerConfig(grpc_port=None, http_port=0, api_keys=file, max_choices=4)
    found: list[ServerConfig | UsageError] = []

    def reread() -> ServerConfig:
        now = found.pop(0)
        if isinstance(now, UsageError):
            raise now
        return now

    async def scenario() -> None:
        ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        async with null_llm() as llm:
            service = asyncio.create_task(serve(repository(llm), config, ready.set_result, reread=reread))
            async with httpx2.AsyncClient(base_url=f"http://{(await ready).http}") as client:

                async def status(key: str, **body: Any) -> int:
                    headers = {"x-api-key": key}
                    answer = await client.post(
                        "/v1/completions", json={"prompt": "x", "max_tokens": 1, **body}, headers=headers
                    )
                    return answer.status_code

                async def hangup(now: ServerConfig | UsageError, message: str) -> None:
                    found.append(now)
                    with caplog.at_level(logging.INFO, "carryall.runtime.service"):
                        signal.raise_signal(signal.SIGHUP)
                        async with asyncio.timeout(30):
                            while message not in caplog.text:
                                await asyncio.sleep(0.005)

                assert await status("a-key", n=3, unheard_of=1) == 200
                new = ServerConfig(
                    grpc_port=None,
                    http_port=9,
                    api_keys=file,
                    max_choices=2,
                    strict=True,
                    max_body_bytes=2000,
                )
                await hangup(new, "changed settings: max_body_bytes, max_choices, strict")
                assert "after a restart only: http_port" in caplog.text
                assert await status("a-key", n=3) == 400
                assert await status("a-key", n=2) == 200
                assert await status("a-key", unheard_of=1) == 400
                assert await status("a-key", user="x" * 2000) == 413
                key_file(tmp_path, b="")
                await hangup(UsageError("[server has no end"), "not reloaded: [server has no end")
                assert await status("a-key") == 401
                assert await status("b-key", n=3) == 400  # the settings stayed
            signal.raise_signal(signal.SIGTERM)
            assert await asyncio.wait_for(service, 10)

    asyncio.run(scenario())
