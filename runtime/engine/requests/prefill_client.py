"""The client of a prefill server: it computes prompts, and writes their KV to the shared tier."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from ....errors import ProviderRuntimeError, UsageError

PREFILL_KEY_VARIABLE = "CARRYALL_PREFILL_KEY"
PREFILL_PATH = "/v1/prefill"
_THREADS = 32  # prompts that are computed elsewhere at a time
_LONGEST_MESSAGE = 200


class ForeignModelError(ProviderRuntimeError):
    """The prefill server has another model, or another layout of KV."""


class PrefillClient(Protocol):
    """Lets prompts be computed elsewhere."""

    def begin(self, token_ids: Sequence[int], salt: str | None, seconds: float) -> Future[None]:
        """Let the KV of a prompt be computed and written to the shared tier.

        Args:
            token_ids: the prompt.
            salt: of its chunks' keys.
            seconds: after which nobody waits for it.

        Returns:
            The end of the work. Its exception is an OSError (late, or the server is away), a
            ``ForeignModelError``, or a ``ProviderRuntimeError`` if the server refused it.
        """

    def close(self) -> None:
        """Wait for nothing, and free the connections."""


class HttpPrefillClient:
    """Asks ``POST /v1/prefill`` of ``carryall serve --role prefill``.

    Args:
        url: of the server: ``http://host:8000``.
        identity: of the model and its KV layout; see ``Engine.kv_identity``.

    Raises:
        UsageError: the URL is invalid.
    """

    def __init__(self, url: str, identity: str) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"prefill_server must be a URL such as http://host:8000, not {url!r}")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + PREFILL_PATH
        self._identity = identity
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(PREFILL_KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {key}"
        self._threads = ThreadPoolExecutor(_THREADS, "carryall-prefill")

    def begin(self, token_ids: Sequence[int], salt: str | None, seconds: float) -> Future[None]:
        """Send a prompt; see ``PrefillClient``."""
        body = {
            "prompt": [int(token) for token in token_ids],
            "cache_salt": salt,
            "identity": self._identity,
            "timeout": seconds,
        }
        return self._threads.submit(self._ask, json.dumps(body).encode(), seconds)

    def close(self) -> None:
        """Drop what was not sent; calls in progress end with their time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, body: bytes, seconds: float) -> None:
        import http.client  # slow to import, and few engines have a prefill server

        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=max(0.01, seconds))
        try:
            connection.request("POST", self._path, body, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"{self._host} does not speak HTTP: {error!r}") from error
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.CONFLICT:
            raise ForeignModelError(_message(content))
        if answer.status != http.HTTPStatus.OK:
            raise ProviderRuntimeError(f"status {answer.status}: {_message(content)}")


def _message(content: bytes) -> str:
    """Return the message of an error, for a line of the log."""
    try:
        return str(json.loads(content)["error"]["message"])[:_LONGEST_MESSAGE]
    except (ValueError, KeyError, TypeError):
        return ascii(content[:_LONGEST_MESSAGE])
