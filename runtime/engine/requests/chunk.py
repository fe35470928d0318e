"""Pieces of KV that live outside of the runner, and their names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Tokens a piece; a multiple of every paged cache's block.
CHUNK_TOKENS = 64

Parts = Sequence[npt.NDArray[Any]]


class ChunkKeys:
    """Names of a sequence's chunks: a chain of hashes, so that a name stands for all tokens up to its end.

    Args:
        identity: the model's content and its KV layout.
        salt: sequences of other salts have other names, so they cannot be found.
    """

    def __init__(self, identity: str, salt: str | None) -> None:
        root = f"{len(identity)} {identity} {'' if salt is None else 'salt ' + salt}"
        self._last = hashlib.sha256(root.encode()).digest()
        self.keys: list[bytes] = []

    def extend(self, tokens: npt.NDArray[np.int64]) -> list[bytes]:
        """The names of all full chunks of ``tokens``, whose beginning must be what was given before."""
        for start in range(len(self.keys) * CHUNK_TOKENS, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            piece = np.ascontiguousarray(tokens[start : start + CHUNK_TOKENS], "<i8").tobytes()
            self._last = hashlib.sha256(self._last + piece).digest()
            self.keys.append(self._last)
        return self.keys[: len(tokens) // CHUNK_TOKENS]


class Tier(Protocol):
    """A store of chunks; what it cannot hold goes to the next one, or is lost."""

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk is here or further down; it may be gone, or found damaged, a moment later."""

    def get(self, key: bytes) -> Parts | None:
        """The chunk, to be copied at once; None if there is none that is whole."""

    def put(self, key: bytes, parts: Parts, *, wait: bool = False) -> None:
        """Keep a chunk, which belongs to the tier from now on, as long as there is room.

        Args:
            key: its name.
            parts: its arrays.
            wait: for what is slow, instead of losing the chunk.
        """

    def close(self) -> None:
        """Bring what should outlive the process to where it does."""


def size_of(parts: Parts) -> int:
    """Bytes of a chunk."""
    return sum(part.nbytes for part in parts)
