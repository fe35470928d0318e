"""HTTP connections with limits of a request's head, which uvicorn does not have.

Without them, a client could keep connections open by sending heads slowly ("slow loris"), or fill the memory
with an endless head.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 2**10
_CONFIRM_SECONDS = 0.05


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose next request head is too slow or too large.

    Attributes:
        head_seconds: how long a client may take to send the head of a request. The time of a new connection
            begins when it is made, that of a later request with its first byte; until then, uvicorn's
            keep-alive timeout applies.
    """

    head_seconds = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        """Start the time of the first head."""
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection, at once if it is idle."""
        super().shutdown()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            # Over TLS, the transport would wait for the client to confirm the end.
            self.loop.call_later(_CONFIRM_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Read data, unless the head is too large."""
        if not self._in_body:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start()
        super().data_received(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self._in_body and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {MOST_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Stop the time: the head is complete."""
        self._stop()
        self._in_body, self._head_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the head of the next request."""
        self._in_body = False
        super().on_message_complete()

    def _start(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def limited(head_seconds: float) -> type[LimitedProtocol]:
    """Return the protocol with a time limit of heads."""
    return type("LimitedProtocol", (LimitedProtocol,), {"head_seconds": head_seconds})
