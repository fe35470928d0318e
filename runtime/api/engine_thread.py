"""The thread that steps an engine for the readers of any number of event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from ...errors import CarryallError, EngineClosedError, RequestError, RequestFailedError
from ..engine.engine import Engine
from ..engine.requests.request import Request
from ..process.delivery import Delivery
from ..process.faults import fault_text, log_fault
from .request_stream import RequestStream

_log = logging.getLogger(__name__)


class EngineThread:
    """A started thread that owns an engine: it runs commands between steps, and publishes the outputs.

    Args:
        engine: only this thread uses it, and closes it at the end.

    Attributes:
        closed: why the engine takes no requests any more; None while it does.
    """

    def __init__(self, engine: Engine) -> None:
        self.closed: str | None = None  # changed under _wake
        self._inbox: list[Callable[[], None]] = []  # guarded by _wake
        self._wake = threading.Condition()
        # Of the thread itself.
        self._engine = engine
        self._streams: dict[str, RequestStream] = {}
        self._deliveries: dict[asyncio.AbstractEventLoop, Delivery[RequestStream]] = {}
        self._thread = threading.Thread(target=self._work, name="carryall-engine", daemon=True)
        self._thread.start()

    def add(self, stream: RequestStream) -> None:
        """Queue the requests of a stream, which gets their outputs or an error.

        Raises:
            EngineClosedError: the thread has ended.
        """
        if not self._tell(lambda: self._add(stream)):
            raise EngineClosedError(self.closed)

    def drop(self, stream: RequestStream) -> None:
        """Cancel the requests of a stream; a running request with the same id is not affected."""
        self._tell(lambda: self._abort(stream))

    def abort(self, request_id: str) -> None:
        """Cancel a request; its reader gets a last state with finish_reason "cancelled"."""
        self._tell(lambda: self._abort(self._streams.get(request_id)))

    def end_thought(self, request_id: str) -> None:
        """End the thought of a request that has a ``reasoning_budget`` with its next token."""

        def end() -> None:
            stream = self._streams.get(request_id)
            for request in stream.group.requests if stream is not None else ():
                if request.sampling.thought is not None:
                    request.sampling.thought.end()

        self._tell(end)

    def close(self) -> None:
        """End all requests with EngineClosedError, close the engine, and wait for the thread."""
        with self._wake:
            self.closed = self.closed or "the engine was shut down"
            self._wake.notify()
        self._thread.join()

    def _tell(self, command: Callable[[], None]) -> bool:
        """Queue ``command``, which runs between steps; False if the thread has ended."""
        with self._wake:
            if self.closed is None and not self._thread.is_alive():
                self.closed = (
                    "the engine's thread does not survive a fork; create AsyncLLM in the child process"
                )
            if self.closed is None:
                self._inbox.append(command)
                self._wake.notify()
            return self.closed is None

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self.closed or self._inbox or self._engine.has_work)
                    if self.closed is not None:
                        return
                    inbox, self._inbox = self._inbox, []
                for command in inbox:
                    command()
                self._publish(self._engine.step())
        except BaseException as error:
            log_fault(_log, "-", "the engine", error)
            with self._wake:
                self.closed = f"the engine failed: {error!r}"
            raise
        finally:
            self._end()

    def _add(self, stream: RequestStream) -> None:
        added = []
        try:
            for request in stream.group.requests:
                if request.request_id in self._streams:
                    raise RequestError(f"request id '{request.request_id}' is in use; ids must be unique")
                self._engine.add(request)
                added.append(request)
        except Exception as error:  # noqa: BLE001 -- fails this request only
            for request in added:
                self._engine.cancel(request.request_id)
            if not isinstance(error, CarryallError):
                log_fault(_log, stream.group.request_id, "queueing it", error)
                error = RequestFailedError(fault_text("queueing the request", error))
            stream.fail(error)
        else:
            self._streams.update({request.request_id: stream for request in added})
            stream.accept()

    def _abort(self, stream: RequestStream | None) -> None:
        if stream is not None and self._streams.get(stream.group.request_id) is stream:
            self._cancel(stream)
            self._publish(stream.group.requests)

    def _cancel(self, stream: RequestStream) -> None:
        for request in stream.group.requests:
            self._engine.cancel(request.request_id)

    def _publish(self, requests: Sequence[Request]) -> None:
        """Tell the readers of the requests' groups that there is news, with one call per event loop."""
        patient: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        urgent: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        for stream in dict.fromkeys(self._streams[request.request_id] for request in requests):
            fault = stream.group.fault
            if fault is not None:
                self._cancel(stream)
                stream.fail(fault)
            else:
                hurries = stream.group.finished or not stream.begun
                (urgent if hurries else patient).setdefault(stream.loop, []).append(stream)
                stream.begun = True
            if stream.group.finished:
                self._remove(stream)
        for loop in patient.keys() | urgent.keys():
            try:
                self._delivery(loop).post(patient.get(loop, ()), urgent.get(loop, ()))
            except RuntimeError:  # the loop is closed
                self._forget(loop)

    def _delivery(self, loop: asyncio.AbstractEventLoop) -> Delivery[RequestStream]:
        delivery = self._deliveries.get(loop)
        if delivery is None:
            kept = {known: one for known, one in self._deliveries.items() if not known.is_closed()}
            delivery = Delivery(loop, RequestStream.tell)
            self._deliveries = {**kept, loop: delivery}
        return delivery

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the requests of an event loop that is closed."""
        for stream in {stream for stream in self._streams.values() if stream.loop is loop}:
            self._cancel(stream)
            self._remove(stream)

    def _remove(self, stream: RequestStream) -> None:
        for request in stream.group.requests:
            del self._streams[request.request_id]

    def _end(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            try:
                command()
            except Exception as error:  # noqa: BLE001 -- all readers below must get an error
                log_fault(_log, "-", "a command left over when the engine ended", error)
        for stream in set(self._streams.values()):
            stream.fail(EngineClosedError(self.closed))
        self._streams.clear()
        self._engine.close()
