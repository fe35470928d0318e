"""Chunks of KV stored outside of the runner, and the keys under which they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ....records import dataclass

# Tokens of a chunk; a multiple of every paged cache's block size.
CHUNK_TOKENS = 64

Parts = Sequence[npt.NDArray[Any]]
# The salt of a request, or the content hashes of its LoRA adapter and its encoder output and the salt.
KVSalt = str | tuple[str, str | None] | None


class ChunkKeys:
    """Keys of a sequence's chunks: a chain of SHA-256 hashes, so that a key covers all tokens up to its end.

    Args:
        identity: the model's content and its KV layout.
        salt: sequences with different salts have different keys.
    """

    def __init__(self, identity: str, salt: KVSalt) -> None:
        if isinstance(salt, tuple):
            adapter, salt = salt
            identity = f"{identity} lora {adapter}"
        root = f"{len(identity)} {identity} {'' if salt is None else 'salt ' + salt}"
        self._last = hashlib.sha256(root.encode()).digest()
        self.keys: list[bytes] = []

    def extend(self, tokens: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the keys of all full chunks of ``tokens`` [n], which must extend the tokens given before."""
        for start in range(len(self.keys) * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            piece = np.ascontiguousarray(tokens[start : start + CHUNK_TOKENS], "<i8").tobytes()
            self._last = hashlib.sha256(self._last + piece).digest()
            self.keys.append(self._last)
        return self.keys[: len(tokens) // CHUNK_TOKENS]


def state_key(key: bytes) -> bytes:
    """Return the key of the state after the tokens that the key of a chunk covers."""
    return hashlib.sha256(b"state " + key).digest()


@dataclass(frozen=True, slots=True)
class Save:
    """Save a slot's chunks to the tiers under ``keys``; KV before ``start`` is no longer in the slot.

    So are the states after ``states`` tokens, multiples of a chunk's length. ``leaves``: the slot loses them.
    """

    slot: int
    keys: tuple[bytes, ...]
    start: int
    states: tuple[int, ...] = ()
    leaves: bool = True


class TierPrefix(NamedTuple):
    """What the tiers hold of a sequence's first tokens.

    Args:
        tokens: tokens that can be restored: with the state after them, where layers have one.
        kv: tokens whose KV is there.
    """

    tokens: int = 0
    kv: int = 0


class Tier(Protocol):
    """A store of chunks. A chunk that does not fit moves to the next tier, or is lost.

    Attributes:
        shared: whether other processes wait for chunks, so that they are put as soon as they are complete.
    """

    shared: bool

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk is in this tier or a lower one; ``get`` may still find it missing or damaged."""

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many first chunks are in this tier or a lower one; it may ask a store elsewhere."""

    def last_held(self, keys: Sequence[bytes]) -> int:
        """Return how many keys there are up to the last one that ``held`` would count alone; 0 if none."""

    def near(self, key: bytes) -> bool:
        """Whether the chunk is in this tier, so that reading it asks no lower one."""

    def get(self, key: bytes, ahead: Sequence[bytes] = ()) -> Parts | None:
        """Return a chunk, which the caller must copy at once; None if it is missing or damaged.

        Args:
            key: the chunk's key.
            ahead: keys that will be asked for next, in this order; a tier may read them meanwhile.
        """

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Store a chunk; the tier owns its arrays from now on.

        Args:
            key: the chunk's key.
            parts: its arrays.
            wait: wait for a slow tier instead of losing the chunk.
        """

    def flush(self, seconds: float) -> bool:
        """Wait until chunks that were put are where others find them; return whether they are. Any thread."""

    def close(self) -> None:
        """Write what should outlive the process, and free the tier."""


def size_of(parts: Parts) -> int:
    """Return the size of a chunk in bytes, at least that of its entry: a model may have no KV but a state."""
    return max(64, sum(part.nbytes for part in parts))
