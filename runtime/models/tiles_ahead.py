"""Pack the tiles of a GGUF file in a thread, while its graph is built and lowered.

Reading and packing run outside of Python's lock. The thread takes the lock, which others may hold for 5 ms
each time, for each group of matrices only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...exporter.gguf.file import GgufTensor
from ...graph_opt.lower.kernels import StoredMatrix, TilePacker
from ...graph_opt.lower.products.stored_tiles import FORMS
from ...graph_opt.lower.products.tiles import COLUMNS
from ...records import dataclass
from ...storage.stored_tensor import no_tiles

_GROUP_BYTES = 2 << 20  # read at a time; 8 MB, new pages each time, cost Gemma 3 a fifth more
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [first, last) of a matrix."""

    tensor: GgufTensor
    first: int
    last: int

    @property
    def begin(self) -> int:
        """The first byte in the file."""
        return self.tensor.place[0] + self.first * self.tensor.row_bytes

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.tensor.place[0] + self.last * self.tensor.row_bytes

    def matrix(self, content: Bytes, begin: int) -> StoredMatrix:
        """Return the rows from a part of the file that starts at ``begin``."""
        rows = content[self.begin - begin : self.end - begin].reshape(-1, self.tensor.row_bytes)
        ordered = rows if self.tensor.in_order else rows[self.tensor.order]
        return StoredMatrix(FORMS[self.tensor.type_name], [ordered], self.tensor.shape[1])


class TilesAhead:
    """A context in which the tiles of matrices may be packed before they are asked for.

    Args:
        matrices: of a file, as they follow each other there.
        pack: the target's routine.
        most_bytes: that may be held at once; then the thread ends.
    """

    def __init__(self, matrices: Sequence[GgufTensor], pack: TilePacker, most_bytes: int) -> None:
        self._matrices = [each for each in matrices if each.type_name in FORMS]
        self._pack, self._most_bytes = pack, most_bytes
        self._changed = threading.Condition()
        self._running: list[_Piece] = []
        self._taken: set[GgufTensor] = set()
        self._packed: dict[GgufTensor, list[Bytes]] = {}
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="carryall-tiles", daemon=True)

    def __enter__(self) -> Self:
        for tensor in self._matrices:
            tensor.take_tiles = partial(self._take, tensor)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ends = True
        self._thread.join()
        for tensor in self._matrices:
            tensor.take_tiles = no_tiles
        self._packed.clear()

    def _run(self) -> None:
        for group in _groups(self._matrices):
            if not self._begin(group):
                return
            tiles: list[Bytes] = []
            try:
                tiles = self._tiles_of(self._running)
            except CheckpointError:  # whoever asks for the matrix meets it too, and says what is wrong
                return
            finally:
                with self._changed:
                    for piece, each in zip(self._running, tiles, strict=False):
                        self._packed.setdefault(piece.tensor, []).append(each)
                    self._running = []
                    self._changed.notify_all()

    def _begin(self, group: Sequence[_Piece]) -> bool:
        """Mark what nobody has asked for of a group as running; return whether the thread goes on."""
        with self._changed:
            wanted = [piece for piece in group if piece.tensor not in self._taken]
            held = sum(tiles.nbytes for each in self._packed.values() for tiles in each)
            goes_on = (
                not self._ends and held + sum(piece.end - piece.begin for piece in wanted) <= self._most_bytes
            )
            self._running = wanted if goes_on else []
        return goes_on

    def _tiles_of(self, group: Sequence[_Piece]) -> list[Bytes]:
        if not group:
            return []
        begin = group[0].begin
        content = group[0].tensor.read_from(begin, max(piece.end for piece in group))
        return self._pack([piece.matrix(content, begin) for piece in group])

    def _take(self, tensor: GgufTensor, order: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return the tiles of the first rows; the thread begins none of the others after this."""
        with self._changed:
            self._taken.add(tensor)
            self._changed.wait_for(lambda: all(piece.tensor is not tensor for piece in self._running))
            tiles = self._packed.pop(tensor, [])
        return tiles if np.array_equal(order, tensor.order) else []


def _groups(matrices: Sequence[GgufTensor]) -> Iterator[list[_Piece]]:
    """Yield pieces that lie near each other in one file, of about 2 MB together."""
    group: list[_Piece] = []
    for piece in (piece for tensor in matrices for piece in _pieces(tensor)):
        if group and (group[0].tensor.path != piece.tensor.path or piece.end - group[0].begin > _GROUP_BYTES):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _pieces(tensor: GgufTensor) -> Iterator[_Piece]:
    """Yield a matrix whose rows are in order in pieces of whole tiles, another one whole."""
    rows = tensor.shape[0] // COLUMNS * COLUMNS
    step = max(1, _GROUP_BYTES // (tensor.row_bytes * COLUMNS)) * COLUMNS if tensor.in_order else rows
    if tensor.in_order or rows == tensor.shape[0]:
        yield from (_Piece(tensor, first, min(first + step, rows)) for first in range(0, rows, step))
