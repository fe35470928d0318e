"""A store whose client may take any time: it runs in a thread, and is waited for as long as it is worth."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from .chunk_store import Content, last_name, names_held

Result = TypeVar("Result")


class StoreClient(Protocol):
    """Contents by name. Any method may take any time, and raise any exception.

    Attributes:
        read_only: whether ``put`` does nothing.
    """

    read_only: bool

    def exist(self, names: Sequence[str]) -> Iterable[bool]:
        """Return whether each name has a content, in order; who iterates may stop early."""

    def fetch(self, names: Sequence[str]) -> Generator[bytes | None, None, None]:
        """Yield the content of each name, in order; None if there is none. It may be closed early."""

    def put(self, name: str, content: bytes) -> None:
        """Store a content; readers see all of it or nothing."""

    def close(self) -> None:
        """Close connections."""


class BoundedStore:
    """Runs calls of a client in one thread, in order; see ``ChunkStore``.

    While a late call still runs, others fail at once. Contents are read ahead of who asks for them.

    Args:
        client: the client.
    """

    def __init__(self, client: StoreClient) -> None:
        self.read_only = client.read_only
        self.client = client
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        self._ahead: dict[str, Future[bytes | None]] = {}  # in the order of the store's answers
        threading.Thread(target=self._run, name="carryall-kv-reads", daemon=True).start()

    def held(self, names: Sequence[str], seconds: float) -> int:
        return self._call(lambda: names_held(self.client.exist(names)), seconds)

    def last_held(self, names: Sequence[str], seconds: float) -> int:
        return self._call(lambda: last_name(self.client.exist(names[::-1]), len(names)), seconds)

    def read(self, name: str, ahead: Sequence[str], seconds: float) -> Content | None:
        self._check()
        if name not in self._ahead:
            self.forget()
            self._read([name, *ahead])
        elif 2 * len(self._ahead) <= len(ahead):  # before the thread has nothing to read
            self._read([each for each in ahead if each not in self._ahead])
        try:
            return self._wait(self._ahead.pop(name), seconds)
        except Exception:
            self.forget()
            raise

    def forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def has(self, name: str) -> bool:
        return all(self.client.exist([name]))

    def put(self, name: str, content: bytes) -> None:
        self.client.put(name, content)

    def close(self) -> None:
        """End the thread, once its calls have ended, and close the client."""
        self.forget()
        self._jobs.put(None)
        self.client.close()

    def _call(self, job: Callable[[], Result], seconds: float) -> Result:
        """Return the result of a call, or raise what it raised.

        Raises:
            TimeoutError: it, or one before it, takes too long.
        """
        self._check()
        future = Future[Result]()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001 -- who waits raises it
                future.set_exception(error)

        self._jobs.put(run)
        return self._wait(future, seconds)

    def _check(self) -> None:
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier call has not ended")

    def _wait(self, future: Future[Result], seconds: float) -> Result:
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # the store's own
                raise
            self._late = future
            raise TimeoutError(f"no answer within {1000 * seconds:.0f} ms") from None

    def _read(self, names: Sequence[str]) -> None:
        """Begin to read contents."""
        if not names:
            return
        futures = [Future[bytes | None]() for _ in names]
        self._ahead.update(zip(names, futures, strict=True))

        def run() -> None:
            unread = deque(futures)
            try:
                with contextlib.closing(self.client.fetch(names)) as contents:
                    for content in contents:
                        if not unread[0].set_running_or_notify_cancel():
                            return  # those behind it are cancelled too
                        unread.popleft().set_result(content)
            except Exception as error:  # noqa: BLE001 -- who waits raises it
                for future in unread:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(error)

        self._jobs.put(run)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
