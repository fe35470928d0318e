"""The pictures of a prompt: what replaces the embeddings of their tokens, and what tells pictures apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The pictures of one prompt.

    KV of a picture's tokens depends on the picture, and the tokens of all pictures are equal. So caches know
    them by ``identity``, which no token id equals: -1 minus 63 bits of a hash of the picture and the place.

    Args:
        states: outputs of ``vision.onnx`` for all pictures, [rows, hidden].
        rows: [tokens of the prompt], the row of each token, -1 for text.
        identity: [tokens of the prompt], token ids of text, numbers below 0 for pictures.
    """

    states: npt.NDArray[np.float32]
    rows: Ids
    identity: Ids

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        image_token_id: int,
        pictures: Sequence[tuple[bytes, npt.NDArray[np.float32]]],
    ) -> PromptImages:
        """Return the pictures of a prompt.

        Args:
            token_ids: of the prompt.
            image_token_id: what stands for a row of a picture; as many as there are rows.
            pictures: key and rows [n, hidden] of each picture, in the order of the prompt.
        """
        identity = np.array(token_ids, np.int64)
        places = np.flatnonzero(identity == image_token_id)
        rows = np.full(len(identity), -1, np.int64)
        rows[places] = np.arange(len(places))
        words = [_words(key, len(states)) for key, states in pictures]
        identity[places] = -1 - np.concatenate(words)
        return cls(np.concatenate([states for _, states in pictures]), rows, identity)

    def part(self, start: int, stop: int) -> tuple[npt.NDArray[np.float32], Ids] | None:
        """Return the states and rows of tokens [start, stop) as for ``Row``; None if all are text."""
        rows = self.rows[start:stop]
        seen = rows[rows >= 0]
        if not len(seen):
            return None
        first = int(seen[0])  # rows of a prompt ascend
        return self.states[first : int(seen[-1]) + 1], np.where(rows >= 0, rows - first, -1)


def _words(key: bytes, count: int) -> Ids:
    """Return 63-bit words of a hash of ``key`` and a counter, [count]."""
    blocks = -(-count // 8)  # of 64 bytes
    content = b"".join(
        hashlib.blake2b(key + number.to_bytes(8, "little")).digest() for number in range(blocks)
    )
    return (np.frombuffer(content, "<u8")[:count] >> np.uint64(1)).astype(np.int64)
