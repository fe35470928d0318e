"""Calls of a store in a thread, and contents that are read ahead of those who ask for them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Raw = TypeVar("Raw")
Content = TypeVar("Content")
Result = TypeVar("Result")

# Checking a chunk takes as long as receiving two: hashes run beside Python.
_DECODERS = 2


class StoreReads(Generic[Raw, Content]):
    """Runs calls in one thread, in order, and waits for each no longer than it is worth.

    While a late call still runs, others fail at once. One thread uses an object of this class.

    Args:
        fetch: yields what the store has of each key, in order; it is closed early if nobody wants the rest.
        decode: returns the content of a key and what the store has; several threads call it.
        name: of the thread.
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[bytes]], Generator[Raw, None, None]],
        decode: Callable[[bytes, Raw], Content],
        name: str,
    ) -> None:
        self._fetch, self._decode = fetch, decode
        self._decoders = ThreadPoolExecutor(_DECODERS, f"{name}-decode")
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        self._ahead: dict[bytes, Future[Content]] = {}  # in the order of the store's answers
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, job: Callable[[], Result], seconds: float) -> Result:
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

    def get(self, key: bytes, ahead: Sequence[bytes], seconds: float) -> Content:
        """Return the content of a key; the other arguments are those of ``call``.

        Args:
            key: its key.
            ahead: keys that will be asked for next, in this order; they are read meanwhile.
            seconds: see ``call``.

        Raises:
            TimeoutError: see ``call``.
        """
        self._check()
        if key not in self._ahead:
            self.forget()
            self._read([key, *ahead])
        elif 2 * len(self._ahead) <= len(ahead):  # before the thread has nothing to read
            self._read([each for each in ahead if each not in self._ahead])
        try:
            return self._wait(self._ahead.pop(key), seconds)
        except Exception:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop what was read ahead."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """End the thread, once its calls have ended."""
        self.forget()
        self._jobs.put(None)
        self._decoders.shutdown(wait=False)

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

    def _read(self, keys: Sequence[bytes]) -> None:
        """Begin to read the contents of keys."""
        if not keys:
            return
        futures = [Future[Content]() for _ in keys]
        self._ahead.update(zip(keys, futures, strict=True))

        def run() -> None:
            unread = deque(futures)
            try:
                with contextlib.closing(self._fetch(keys)) as contents:
                    for key, raw in zip(keys, contents, strict=True):
                        if unread[0].cancelled():
                            return  # those behind it are cancelled too
                        self._decoders.submit(self._resolve, unread.popleft(), key, raw)
            except Exception as error:  # noqa: BLE001 -- who waits raises it
                for future in unread:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(error)

        self._jobs.put(run)

    def _resolve(self, future: Future[Content], key: bytes, raw: Raw) -> None:
        """Give a future the content of a key, or the error of decoding it."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._decode(key, raw))
        except Exception as error:  # noqa: BLE001 -- who waits raises it
            future.set_exception(error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
