"""Which blocks of tokens the slots hold, as events for routers that send requests where their prefix is."""

from __future__ import annotations

from collections.abc import Sequence

from ....records import dataclass
from ..requests.chunk import CHUNK_TOKENS
from ..requests.request import Request


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A slot holds the KV of blocks that no slot held before.

    Args:
        keys: of the blocks, in the order of their positions.
        parent: the key of the block before the first one; None if that is the first of its text.
        token_ids: of all blocks.
        lora: the name of the adapter; None without one.
        salt: the ``cache_salt``, part of the first block's key.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    lora: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """No slot holds these blocks any longer."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """No slot holds any block."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class HeldBlocks:
    """The whole blocks of 64 tokens whose KV is computed, by slot; a block may be in several slots.

    Args:
        identity: of the model and its KV layout, part of the keys.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._slots: dict[int, list[bytes]] = {}
        self._holders: dict[bytes, int] = {}
        self._events: list[BlockEvent] = [BlocksCleared()]  # routers may know an earlier process

    def count(self, slot: int) -> int:
        """Return how many blocks a slot holds."""
        return len(self._slots.get(slot, ()))

    def hold(self, slot: int, keys: Sequence[bytes], request: Request) -> None:
        """Record that a slot holds the blocks with these keys, the first ones of a request, and no others."""
        before = self._slots.get(slot, [])
        common = next((i for i, (a, b) in enumerate(zip(before, keys, strict=False)) if a != b), None)
        if common is None:
            common = min(len(before), len(keys))
        stored = [i for i in range(common, len(keys)) if not self._holders.get(keys[i])]
        for key in keys[common:]:
            self._holders[key] = self._holders.get(key, 0) + 1
        if stored:  # the blocks before them are held already, so they are the last ones
            self._store(keys, stored[0], request)
        self._slots[slot] = list(keys)
        self._drop(before[common:])

    def release(self, slot: int) -> None:
        """Record that a slot holds nothing."""
        self._drop(self._slots.pop(slot, []))

    def take(self) -> list[BlockEvent]:
        """Remove and return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _store(self, keys: Sequence[bytes], first: int, request: Request) -> None:
        tokens = request.token_slice(first * CHUNK_TOKENS, len(keys) * CHUNK_TOKENS)
        self._events.append(
            BlocksStored(
                tuple(keys[first:]),
                keys[first - 1] if first else None,
                tuple(tokens.tolist()),
                None if request.adapter is None else request.adapter.name,
                request.cache_salt,
            )
        )

    def _drop(self, keys: Sequence[bytes]) -> None:
        gone = []
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                gone.append(key)
        if gone:
            self._events.append(BlocksRemoved(tuple(gone)))
