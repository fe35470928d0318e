"""Pictures to rows of the decoder's input, by ``vision.onnx``; results of equal tiles are computed once."""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from ...contract import IMAGE_STATES, INPUT_IDS
from ...errors import RequestError
from ...exporter.image_processor import ImageProcessor
from ...records import dataclass
from ..process.kept import Kept
from .opening import Pixels, open_picture, read_picture
from .units import Ids, Prepared, UnitInputs, Values, joined, unit_key, unit_size
from .video import Video

_log = logging.getLogger(__name__)

States = npt.NDArray[np.float32]  # [rows, hidden]
CACHE_BYTES = 256 * 2**20
PREPARED_BYTES = 64 * 2**20  # of pictures in the size that the tower sees, kept for a second question
_PIXELS_OF_A_RUN = 4 * 512 * 512  # bounds the memory of a run; more in one are hardly faster
# Scores of attention take 4 bytes for each pair of patches and each head: 4 GiB with 16 heads.
MOST_PATCHES = 8192


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture or a video that was prepared for the model.

    Args:
        key: 32 bytes that tell apart all pictures that the model sees differently.
        prepared: its units, text and places.
        num_tokens: tokens of the prompt that its states replace; 0 for a model without such prompts.
        size: pixels (height, width) of the picture as it was given.
        place: what the chat template writes for it; empty for a model without such prompts.
        num_frames: of a video; 1 for a picture.
    """

    key: bytes
    prepared: Prepared
    num_tokens: int
    size: tuple[int, int]
    place: str = ""
    num_frames: int = 1

    @property
    def num_pixels(self) -> int:
        """Pixels of all frames as they were given."""
        return self.num_frames * math.prod(self.size)

    @property
    def num_bytes(self) -> int:
        """The memory of its units."""
        return sum(unit.nbytes for unit in self.prepared.units)

    @property
    def seen_size(self) -> tuple[int, int]:
        """Pixels (height, width) in which the model sees it, of tiles all together."""
        (rows, columns), (height, width) = self.prepared.grid, unit_size(self.prepared.units[0])
        return rows * height, columns * width

    @property
    def text(self) -> str:
        """What stands for it in a prompt."""
        return self.prepared.text

    @property
    def places(self) -> Sequence[Ids]:
        return self.prepared.places


class Geometry(Protocol):
    """What the module of a family defines.

    If it defines ``prepare_several`` too, that is for each of several pictures of a conversation. If the
    processor has a text for videos, it defines ``prepare_video``, which takes the frames and their seconds.
    If the encoder reads texts, it defines ``question``, the text with what is around it, and ``places``, how
    those in an answer are read.
    """

    def prepare(self, processor: Any, pixels: Pixels) -> Prepared:
        """Return a picture in units.

        Raises:
            RequestError: the family does not take pictures of this shape.
        """

    def inputs(self, processor: Any, unit: Values) -> UnitInputs:
        """Return the inputs of ``vision.onnx`` for a unit."""


class ImageEncoder:
    """Turns pictures into rows of the decoder's input. Thread-safe.

    Args:
        processor: how pictures are prepared.
        run: runs ``vision.onnx``; returns ``image_states`` float32 [tokens, hidden].
        cache_bytes: most bytes of kept results; the least recently used go first.
        read: runs ``text_encoder.onnx``; None if the encoder reads no texts.

    Attributes:
        num_encoded: units that were computed, which those of the cache are not.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        run: Callable[[Mapping[str, npt.NDArray[Any]]], States],
        cache_bytes: int = CACHE_BYTES,
        read: Callable[[Mapping[str, npt.NDArray[Any]]], States] | None = None,
    ) -> None:
        self.processor, self._run, self._read = processor, run, read
        name = f"{__package__}.{processor.family}"
        self._geometry = cast(Geometry, importlib.import_module(name))
        self.num_encoded = 0
        self._kept = Kept[States](lambda states: states.nbytes, cache_bytes)
        self._constants: list[States] = []  # rows that are the same for all pictures, once they are known
        self._prepared = Kept[Picture](lambda picture: picture.num_bytes, PREPARED_BYTES)
        self._lock = threading.Lock()  # one run at a time: each uses all threads

    def prepare(
        self,
        source: Any,
        *,
        several: bool = False,
        salt: str = "",
        processor: ImageProcessor | None = None,
    ) -> Picture:
        """Open a picture and resize it or cut it into units; files and arrays that are known are not.

        Args:
            source: as for ``open_picture``.
            several: whether it is one of several pictures of a conversation.
            salt: only pictures of the same salt are known; see ``states``.
            processor: this encoder's with other sizes of pictures; None for its own.

        Raises:
            RequestError: it cannot be opened, or is too large for the model's memory.
            MissingExtraError: Pillow is not installed.
        """
        if isinstance(source, str | os.PathLike):
            source = read_picture(Path(source))
        processor = processor or self.processor
        options = f"{several} {'' if processor == self.processor else processor} {len(salt)} {salt}"
        name = _source_key(source, options)
        if name is None:
            return self._made(source, processor, several=several)
        with self._lock:
            known = self._prepared.get(name)
        if known is not None:
            return known
        picture = self._made(source, processor, several=several)
        with self._lock:
            self._prepared.put(name, picture)
        return picture

    def _made(self, source: Any, processor: ImageProcessor, *, several: bool) -> Picture:
        pixels = open_picture(source)
        alone = self._geometry.prepare
        prepare = getattr(self._geometry, "prepare_several", alone) if several else alone
        prepared = prepare(processor, pixels)
        place = self.processor.place if "image" in self.processor.texts else ""
        return self._picture(prepared, (pixels.shape[0], pixels.shape[1]), place)

    def prepare_video(self, video: Video) -> Picture:
        """Resize the frames of a video.

        Raises:
            RequestError: the model reads pictures only, or a frame is too large for its memory.
        """
        place = self.processor.texts.get("video")
        if place is None:
            raise RequestError("this model reads pictures, not videos; send frames as pictures")
        module: Any = self._geometry
        prepared = module.prepare_video(self.processor, video)
        size = video.frames[0].shape[0], video.frames[0].shape[1]
        return self._picture(prepared, size, place, len(video.frames))

    def _picture(self, prepared: Prepared, size: tuple[int, int], place: str, num_frames: int = 1) -> Picture:
        height, width = size
        patch = self.processor.patch
        patches = max((high // patch) * (wide // patch) for high, wide in map(unit_size, prepared.units))
        if self.processor.whole_units and patches > MOST_PATCHES:
            raise RequestError(
                f"a picture of {width} x {height} pixels makes {patches} patches of {self.processor.patch} "
                f"pixels; the limit is {MOST_PATCHES}; make it smaller, or ask for less detail"
            )
        key = hashlib.blake2b(f"{self.processor} {prepared.text}".encode(), digest_size=32)
        for unit in prepared.units:
            key.update(unit_key(unit))
        for array in (prepared.rows, *prepared.places):
            key.update(b"" if array is None else array.tobytes())
        count = sum(map(prepared.text.count, self.processor.tokens))
        return Picture(key.digest(), prepared, count, size, place, num_frames)

    def states(self, picture: Picture, salt: str = "") -> States:
        """Return the rows [tokens, hidden] of a picture; units that are known are not computed.

        Args:
            picture: of this encoder.
            salt: only results of the same salt are known, so that time tells no tenant of others' pictures.

        Raises:
            ProviderRuntimeError: the run failed.
        """
        units, order, weights = picture.prepared.units, picture.prepared.rows, picture.prepared.weights
        keys = [unit_key(unit, salt) for unit in units]
        with self._lock:
            rows = {key: states for key in keys if (states := self._kept.get(key)) is not None}
            missing = {key: unit for key, unit in zip(keys, units, strict=True) if key not in rows}
            for part in _runs(missing):
                rows |= zip(part, self._encode([missing[name] for name in part]), strict=True)
            for key, states in rows.items():
                self._kept.put(key, states)
            height, width = picture.size
            _log.debug(
                "a picture of %d x %d pixels: %d of %d units computed, %d in all",
                *(width, height, len(missing), len(keys), self.num_encoded),
            )
        states = np.concatenate([*(rows[key] for key in keys), *self._constants])
        if order is None:
            return states
        return states[order] if weights is None else np.einsum("tkh,tk->th", states[order], weights)

    def read(self, picture: Picture, text: Sequence[int], salt: str = "") -> States:
        """Return the rows of a picture and of tokens behind it, for an encoder that reads texts.

        The arguments are those of ``states``; results are kept likewise.

        Raises:
            ProviderRuntimeError: a run failed.
        """
        if self._read is None:
            raise AssertionError("unreachable: only an encoder that reads texts is given one")
        states = self.states(picture, salt)
        tokens = np.array(text, np.int64)
        name = f"{len(tokens)} {salt}".encode()
        key = hashlib.blake2b(picture.key + tokens.tobytes() + name, digest_size=32).digest()
        with self._lock:
            rows = self._kept.get(key)
            if rows is None:
                rows = self._read({IMAGE_STATES: states, INPUT_IDS: tokens})
                self._kept.put(key, rows)
        return rows

    @property
    def geometry(self) -> Any:
        """The module of the family; see ``Geometry``."""
        return self._geometry

    def feeds(self, units: Sequence[Values]) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of ``vision.onnx`` for units of pictures, which run together."""
        return joined([self._geometry.inputs(self.processor, unit) for unit in units])

    def _encode(self, units: Sequence[Values]) -> Sequence[States]:
        """Run units together."""
        inputs = [self._geometry.inputs(self.processor, unit) for unit in units]
        states = self._run(joined(inputs))
        if count := self.processor.constants:
            states, self._constants = states[:-count], [states[-count:]]
        self.num_encoded += len(units)
        ends = np.cumsum([len(unit.merged) for unit in inputs])[:-1]
        return [part.copy() for part in np.split(states, ends)]


def _source_key(source: Any, options: str) -> bytes | None:
    """Return 32 bytes that tell files and arrays apart; None for what must be opened to know.

    Args:
        source: see ``open_picture``.
        options: what else the result depends on.
    """
    if isinstance(source, np.ndarray) and source.dtype == np.uint8:  # others are refused, or have no bytes
        kind, content = f"{source.dtype} {source.shape}", np.ascontiguousarray(source).data
    elif isinstance(source, bytes | bytearray | memoryview):
        kind, content = "file", memoryview(source)
    else:
        return None
    key = hashlib.blake2b(f"{kind} {options}".encode(), digest_size=32)
    key.update(content)
    return key.digest()


def _runs(units: Mapping[bytes, Values]) -> Iterator[list[bytes]]:
    """Yield the keys of units that are computed together: of one shape, since groups are padded."""
    part: list[bytes] = []
    for key, unit in units.items():
        shape = units[part[0]].shape if part else unit.shape
        full = (len(part) + 1) * math.prod(unit_size(unit)) > _PIXELS_OF_A_RUN
        if part and (full or shape != unit.shape):
            yield part
            part = []
        part.append(key)
    if part:
        yield part
