"""The pictures of a prompt: what replaces the embeddings of their tokens, and what tells pictures apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....records import dataclass
from ...types.outputs import PictureUsage

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
        ahead: [tokens of the prompt], how many tokens of its picture are behind each token.
        positions: [axes, tokens of the prompt], positions in time, height and width; None if positions have
            one axis.
        usage: what each picture takes.
    """

    states: npt.NDArray[np.float32]
    rows: Ids
    identity: Ids
    ahead: npt.NDArray[np.int32]
    positions: Ids | None = None
    usage: tuple[PictureUsage, ...] = ()

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        image_token_ids: Sequence[int],
        pictures: Sequence[tuple[bytes, npt.NDArray[np.float32]]],
        places: Sequence[Ids] = (),
        usage: Sequence[PictureUsage] = (),
    ) -> PromptImages:
        """Return the pictures of a prompt.

        Args:
            token_ids: of the prompt.
            image_token_ids: what stands for a row of a picture or a video; as many as there are rows.
            pictures: key and rows [n, hidden] of each picture, in the order of the prompt.
            places: the places [axes, n] in time, height and width of each run of rows without text between:
                a picture, or a part of a video; nothing for models whose positions have one axis.
            usage: what each picture takes.
        """
        identity = np.array(token_ids, np.int64)
        seen = np.flatnonzero(np.isin(identity, image_token_ids))
        rows = np.full(len(identity), -1, np.int64)
        rows[seen] = np.arange(len(seen))
        words = [_words(key, len(states)) for key, states in pictures]
        identity[seen] = -1 - np.concatenate(words)
        positions = _positions(len(identity), seen, places) if places else None
        states = np.concatenate([states for _, states in pictures])
        return cls(states, rows, identity, _ahead(rows >= 0), positions, tuple(usage))

    def part(self, start: int, stop: int) -> tuple[npt.NDArray[np.float32], Ids] | None:
        """Return the states and rows of tokens [start, stop) as for ``Row``; None if all are text."""
        rows = self.rows[start:stop]
        seen = rows[rows >= 0]
        if not len(seen):
            return None
        first = int(seen[0])  # rows of a prompt ascend
        return self.states[first : int(seen[-1]) + 1], np.where(rows >= 0, rows - first, -1)

    def whole(self, start: int, stop: int) -> int:
        """Return the end of tokens [start, stop) without the part of a picture that ``stop`` would cut.

        If nothing is left, it is the end of that picture.
        """
        if stop > len(self.ahead) or not self.ahead[stop - 1]:
            return stop
        ends = np.flatnonzero(self.ahead[start:stop] == 0)
        return start + int(ends[-1]) + 1 if len(ends) else stop + int(self.ahead[stop - 1])

    def rope_positions(self, start: int, stop: int) -> Ids | None:
        """Return positions [axes, stop - start] of tokens [start, stop), also of those behind the prompt."""
        known = self.positions
        if known is None:
            return None
        count = known.shape[1]
        if stop <= count:
            return known[:, start:stop]
        behind = int(known[:, -1].max()) + 1 - count + np.arange(max(start, count), stop)
        return np.concatenate([known[:, start:], np.broadcast_to(behind, (len(known), len(behind)))], axis=1)


def _ahead(seen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return how many tokens of its picture are behind each token, from where pictures are.

    Tokens that are neighbours are of one picture, also if they are of several.
    """
    ahead = np.zeros(len(seen), np.int32)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], seen.astype(np.int8), [0]])))
    for begin, end in edges.reshape(-1, 2):
        ahead[begin:end] = np.arange(end - begin)[::-1]
    return ahead


def _positions(count: int, seen: Ids, places: Sequence[Ids]) -> Ids:
    """Return the positions [axes, count] of a prompt (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1).

    Text counts on along all axes. A picture begins where text would, and text behind it goes on from its
    largest position.
    """
    axes = len(places[0])
    steps = np.ones(count, np.int64)  # from the token before
    offsets = np.zeros((axes, count), np.int64)
    first = 0
    for place in places:
        size = place.shape[1]
        tokens = seen[first : first + size]
        steps[tokens[1:]] = 0
        offsets[:, tokens] = place
        if tokens[-1] + 1 < count:
            steps[tokens[-1] + 1] = int(place.max()) + 1
        first += size
    return np.asarray(np.cumsum(steps) - 1 + offsets, np.int64)


def _words(key: bytes, count: int) -> Ids:
    """Return 63-bit words of a hash of ``key`` and a counter, [count]."""
    blocks = -(-count // 8)  # of 64 bytes
    content = b"".join(
        hashlib.blake2b(key + number.to_bytes(8, "little")).digest() for number in range(blocks)
    )
    return (np.frombuffer(content, "<u8")[:count] >> np.uint64(1)).astype(np.int64)
