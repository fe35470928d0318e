"""The shared tier: KV chunks in a store of other hosts, which may lie, lag, be full or be gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ....process.backoff import Backoff
from ...requests.chunk import Parts, Tier, size_of
from .chunk_store import ChunkStore, Content
from .kv_file import DamagedFileError, decode_chunk, encode_chunk, file_name

_log = logging.getLogger(__name__)

_MOST_KNOWN = 1 << 18  # names that are remembered
_CLOSE_SECONDS = 5.0  # for chunks that are not written yet
_AHEAD_BYTES = 1 << 23  # of chunks that are read before they are asked for

Result = TypeVar("Result")


class StoreTier:
    """Chunks in a shared store, beside an own tier that is asked first.

    Chunks are authenticated as files are, so what was not written with the secret counts as missing. The
    store is waited for no longer than computing the tokens takes. After a failed or late call, it is left
    alone for 1 s, after the next for 2 s, up to 60 s: requests go on as without it.

    Args:
        store: the store.
        secret: the key shared by all users of the store; see ``storage.secret.kv_key``.
        patience: returns how many seconds computing a chunk takes.
        own: the tier that is asked first; None if there is none.
        max_pending_bytes: maximum size of chunks that are not written yet; further chunks are dropped.

    Attributes:
        given_up: number of chunks that were not written.
        refused: number of chunks that were damaged or forged.
        store: as given.
    """

    shared = True

    def __init__(
        self,
        store: ChunkStore,
        secret: bytes,
        patience: Callable[[], float],
        tier: Tier | None = None,
        max_pending_bytes: int = 2**29,
    ) -> None:
        self.given_up = self.refused = 0
        self.store = store
        self._secret = secret
        self._patience = patience
        self._own = tier
        self._max_pending_bytes = max_pending_bytes
        self._known: dict[bytes, None] = {}  # chunks that the store had, oldest first
        self._pending: dict[bytes, Parts] = {}  # guarded by _change, as are the next ones
        self._pending_bytes = 0
        self._closed = False
        self._backoff = Backoff()
        self._change = threading.Condition()
        self._chunk_bytes = _AHEAD_BYTES >> 2  # of the newest one, at first a guess
        self._writer = threading.Thread(target=self._write, name="carryall-kv-store", daemon=True)
        self._writer.start()

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk is known to be held; the store is not asked."""
        own = self._own is not None and key in self._own
        return own or key in self._pending or key in self._known

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many first chunks are there; 0 of the store if it does not answer in time."""
        count = 0 if self._own is None else self._own.held(keys)
        rest = keys[count:]
        if not rest:
            return count
        names = [file_name(key, self._secret) for key in rest]
        more = self._ask(lambda seconds: self.store.held(names, seconds), len(rest)) or 0
        for key in rest[:more]:
            self._remember(key)
        return count + more

    def last_held(self, keys: Sequence[bytes]) -> int:
        """See ``Tier``; keys of the store do not count if it does not answer in time."""
        count = 0 if self._own is None else self._own.last_held(keys)
        rest = keys[count:]
        if not rest:
            return count
        names = [file_name(key, self._secret) for key in rest]
        more = self._ask(lambda seconds: self.store.last_held(names, seconds), len(rest)) or 0
        if more:
            self._remember(rest[more - 1])
        return count + more

    def near(self, key: bytes) -> bool:
        """See ``Tier``."""
        return key in self

    def get(self, key: bytes, ahead: Sequence[bytes] = ()) -> Parts | None:
        """Return a chunk; None if it is missing, forged, or does not come in time."""
        parts = None if self._own is None else self._own.get(key)
        if parts is None:
            with self._change:
                parts = self._pending.get(key)
        if parts is not None:
            return parts
        rest = ahead[: _AHEAD_BYTES // self._chunk_bytes]
        if self._own is not None:
            rest = [each for each in rest if each not in self._own]
        name, *others = [file_name(each, self._secret) for each in [key, *rest]]
        content = self._ask(lambda seconds: self.store.read(name, others, seconds), 1)
        parts = None if content is None else self._decoded(key, content)
        if parts is None:
            self.store.forget()  # those behind it are not needed
            self._known.pop(key, None)
            return None
        self._chunk_bytes = size_of(parts)
        return parts

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Queue a chunk for writing; it is dropped if too many wait."""
        if self._own is not None:
            self._own.put(key, parts, wait=wait)
        if self.store.read_only:
            return
        with self._change:
            size = size_of(parts)
            if self._closed or key in self._pending or self._pending_bytes + size > self._max_pending_bytes:
                self.given_up += key not in self._pending
                return
            self._pending[key] = parts
            self._pending_bytes += size
            self._change.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all chunks for the store are written or given up; return whether they are."""
        with self._change:
            return self._change.wait_for(lambda: not self._pending, seconds)

    def close(self) -> None:
        """Close the own tier, and write queued chunks for at most 5 s."""
        if self._own is not None:
            self._own.close()
        self.flush(_CLOSE_SECONDS)
        with self._change:
            self._closed = True
            self.given_up += len(self._pending)
            self._pending.clear()
            self._change.notify_all()
        self._writer.join(_CLOSE_SECONDS)
        if not self._writer.is_alive():
            self.store.close()

    def _decoded(self, key: bytes, content: Content) -> Parts | None:
        """Return a chunk; None if it is not to be used."""
        try:
            return decode_chunk(memoryview(content), key, self._secret)
        except DamagedFileError as error:
            self.refused += 1
            _log.warning("a chunk of the shared prefix cache is not used: %s", error)
            return None

    def _ask(self, call: Callable[[float], Result], chunks: int) -> Result | None:
        """Return the result of ``call(seconds)``; None if the store is paused, fails, or takes too long.

        Args:
            call: is given how many seconds it may take.
            chunks: what the answer saves from being computed.
        """
        if self._backoff.paused:
            return None
        try:
            result = call(self._patience() * chunks)
        except Exception as error:  # noqa: BLE001 -- clients raise what they like; the KV is computed instead
            self._failed(error)
            return None
        self._backoff.succeeded()
        return result

    def _failed(self, error: Exception) -> None:
        seconds = self._backoff.failed()
        kind = type(error).__name__
        _log.warning("the shared prefix cache is not asked for %.0f s: %s: %s", seconds, kind, error)

    def _remember(self, key: bytes) -> None:
        self._known[key] = None
        while len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                key, parts = next(iter(self._pending.items()))
            written = self._write_one(key, parts)
            with self._change:
                if self._pending.pop(key, None) is not None:
                    self._pending_bytes -= size_of(parts)
                    self.given_up += not written
                self._change.notify_all()

    def _write_one(self, key: bytes, parts: Parts) -> bool:
        if self._backoff.paused:
            return False
        name = file_name(key, self._secret)
        try:
            if not self.store.has(name):
                self.store.put(name, bytes(encode_chunk(key, parts, self._secret)))
        except Exception as error:  # noqa: BLE001 -- see ``_ask``
            self._failed(error)
            return False
        self._remember(key)
        return True
