"""Pictures to rows of the decoder's input, by ``vision.onnx``; results of equal tiles are computed once."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import GROUP_ROWS, GROUPS, MERGED_PATCHES, PATCH_POSITIONS, PIXELS
from ...exporter.image_processor import ImageProcessor
from . import idefics3
from .opening import open_picture

_log = logging.getLogger(__name__)

States = npt.NDArray[np.float32]  # [rows, hidden]
CACHE_BYTES = 256 * 2**20
_TILES_OF_A_RUN = 4  # bounds the memory of a run; more tiles in one are hardly faster


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that was prepared for the model.

    Args:
        key: 32 bytes that tell apart all pictures that the model sees differently.
        text: what stands for it in a prompt.
        tiles: its tiles, in the order of the places in ``text``.
        size: pixels (height, width) of the picture as it was given.
    """

    key: bytes
    text: str
    tiles: Sequence[idefics3.Tile]
    size: tuple[int, int]


class ImageEncoder:
    """Turns pictures into rows of the decoder's input. Thread-safe.

    Args:
        processor: how pictures are prepared.
        run: runs ``vision.onnx``; returns ``image_states`` float32 [tokens, hidden].
        cache_bytes: most bytes of kept results; the least recently used go first.

    Attributes:
        num_encoded: tiles that were computed, which those of the cache are not.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        run: Callable[[Mapping[str, npt.NDArray[Any]]], States],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.processor, self._run, self._room = processor, run, cache_bytes
        self.num_encoded = 0
        self._kept: OrderedDict[bytes, States] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # one run at a time: each uses all threads

    def prepare(self, source: Any) -> Picture:
        """Open a picture and cut it into tiles.

        Args:
            source: as for ``open_picture``.

        Raises:
            RequestError: it cannot be opened.
            MissingExtraError: Pillow is not installed.
        """
        pixels = open_picture(source)
        tiles, grid = idefics3.tiles(self.processor, pixels)
        key = hashlib.blake2b(f"{self.processor} {grid}".encode(), digest_size=32)
        for tile in tiles:
            key.update(_key(tile))
        text = idefics3.prompt_text(self.processor, grid)
        return Picture(key.digest(), text, tiles, (pixels.shape[0], pixels.shape[1]))

    def states(self, picture: Picture) -> States:
        """Return the rows [tiles * tile tokens, hidden] of a picture; tiles that are known are not computed.

        Raises:
            ProviderRuntimeError: the run failed.
        """
        keys = [_key(tile) for tile in picture.tiles]
        with self._lock:
            rows = {key: self._kept[key] for key in keys if key in self._kept}
            missing = {key: tile for key, tile in zip(keys, picture.tiles, strict=True) if key not in rows}
            names = list(missing)
            for first in range(0, len(names), _TILES_OF_A_RUN):
                part = names[first : first + _TILES_OF_A_RUN]
                rows |= zip(part, self._encode([missing[name] for name in part]), strict=True)
            self._keep(rows)
            height, width = picture.size
            _log.debug(
                "a picture of %d x %d pixels: %d of %d tiles computed, %d in all",
                *(width, height, len(missing), len(keys), self.num_encoded),
            )
        return np.concatenate([rows[key] for key in keys])

    def _encode(self, tiles: Sequence[idefics3.Tile]) -> Sequence[States]:
        """Run tiles together; each is a group, which attention does not leave."""
        processor, count = self.processor, len(tiles)
        size = (processor.tile // processor.patch) ** 2
        merged = idefics3.merged(processor)
        numbers = np.arange(count * size, dtype=np.int64)
        feeds = {
            PIXELS: np.concatenate([idefics3.patches(processor, tile) for tile in tiles]),
            PATCH_POSITIONS: np.tile(idefics3.positions(processor), count),
            GROUPS: numbers.reshape(count, size),
            GROUP_ROWS: numbers,
            MERGED_PATCHES: np.concatenate([merged + number * size for number in range(count)]),
        }
        states = self._run(feeds)
        self.num_encoded += count
        return [part.copy() for part in np.split(states, count)]

    def _keep(self, rows: Mapping[bytes, States]) -> None:
        for key, states in rows.items():
            if key in self._kept:
                self._kept.move_to_end(key)
                continue
            self._kept[key] = states
            self._bytes += states.nbytes
        while self._bytes > self._room:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes


def _key(tile: idefics3.Tile) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tile).tobytes(), digest_size=32).digest()
