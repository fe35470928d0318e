"""Read the header of a GGUF file: metadata and the position of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The reader
of the ``gguf`` package is not used: a damaged array length makes it loop for hours.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError
from ...records import dataclass
from .block_types import TYPES
from .text_table import Bytes, Numbers, PackedTexts, begins_of

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")  # of a string
_LEAST_STRING = 9  # bytes of a length and a character
_WINDOW = 1 << 16  # bytes of strings looked at together
_FEW = 64  # strings read one by one where that finds fewer


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type, shape and position of one tensor in a GGUF file.

    Args:
        name: GGUF's name, such as ``blk.0.attn_q.weight``.
        type_name: GGML's type, such as ``Q4_K``.
        shape: outermost axis first, as in NumPy.
        begin: offset of its first byte in the file.
        size: number of bytes.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


class ShortHeaderError(Exception):
    """The header is longer than the bytes that were read of the file."""


class _Cursor:
    """Read values in sequence; no read exceeds the end of the file."""

    def __init__(self, data: memoryview, path: Path, size: int) -> None:
        self.data, self.path, self.size, self.position = data, path, size, 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if len(self.data) < end <= self.size:
            raise ShortHeaderError
        if end > self.size:
            raise damaged(self.path, f"the header needs {size} bytes at {self.position}")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        raw = bytes(self.take(self.number("<Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw.decode(errors="replace")  # some vocabularies contain single bytes

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("<I"), self.number("<Q"))
        if kind not in _SCALARS:
            raise damaged(self.path, f"metadata of type {kind}, which GGUF does not define")
        return self.number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> Sequence[Any]:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return values
        if kind != _STRING:
            raise damaged(self.path, f"an array of type {kind}; carryall reads arrays of numbers and strings")
        if count * 8 > self.size - self.position:  # each string has a length of 8 bytes
            raise damaged(self.path, f"an array of {count} strings, more than the file has room for")
        if len(self.data) < min(self.size, self.position + count * _LEAST_STRING):
            raise ShortHeaderError  # before most of them are read in vain
        return self._texts(count)

    def _texts(self, count: int) -> PackedTexts:
        """Read strings; vocabularies have hundreds of thousands, and ``text`` takes 5 us for each."""
        data = self.data
        ends = _ends(data, self.position, count)
        if len(ends) <= count or ends[-1] > len(data):
            self.position = int(ends[ends <= len(data)][-1])
            self.text()  # says what is wrong
        begins, self.position = ends[:-1] - ends[0], int(ends[-1])
        raw = np.frombuffer(data[ends[0] : ends[-1]], np.uint8)
        is_text = np.ones(len(raw), bool)
        for place in range(_LENGTH.size):
            is_text[begins + place] = False
        return _packed(raw[is_text], np.cumsum(np.diff(ends) - _LENGTH.size))


def _ends(data: memoryview, begin: int, count: int) -> Numbers:
    """Return ``begin`` and the ends of the strings from there on, int64 [count + 1].

    There are fewer if the data end, and the last may be behind their end. Each string is a length of 8 bytes
    and as many bytes.
    """
    known, missing = [np.array([begin], np.int64)], count
    while missing and begin < len(data):
        found = _likely_ends(np.frombuffer(data[begin : begin + _WINDOW], np.uint8))[:missing]
        if len(found) < _FEW:
            found = np.array(list(_single_ends(data[begin:], min(_FEW, missing))), np.int64)
            if not len(found):
                break
        known.append(found + begin)
        missing -= len(found)
        begin = int(known[-1][-1])
    return np.concatenate(known)


def _likely_ends(data: Bytes) -> Numbers:
    """Return the ends of strings from the first byte on, up to one of 256 bytes or with seven zeros.

    A length below 256 has seven zeros behind it, which text hardly has. Where each of these places is as far
    from the one before as the length there says, all of them are lengths.
    """
    if len(data) < _LENGTH.size:
        return np.zeros(0, np.int64)
    zeros = data == 0
    follow = np.ones(len(data) - _LENGTH.size + 1, bool)
    for place in range(1, _LENGTH.size):
        follow &= zeros[place : place + len(follow)]
    begins = np.flatnonzero(follow)
    if not len(begins) or begins[0]:
        return np.zeros(0, np.int64)
    right = begins[:-1] + _LENGTH.size + data[begins[:-1]] == begins[1:]
    return begins[1 : 1 + (len(right) if right.all() else int(right.argmin()))]


def _single_ends(data: memoryview, count: int) -> Iterator[int]:
    end = 0
    with contextlib.suppress(struct.error, OverflowError):  # the data end, which the caller looks at
        for _ in range(count):
            end += _LENGTH.size + _LENGTH.unpack_from(data, end)[0]
            yield min(end, len(data) + 1)  # a length may exceed 63 bits


def _packed(data: Bytes, ends: Numbers) -> PackedTexts:
    """Return texts; of bytes that are no UTF-8, which some vocabularies have, each is replaced."""
    first = data[begins_of(ends)[ends > begins_of(ends)]]
    try:
        if ((first & 0xC0) == 0x80).any():
            raise ValueError("a character in two texts")
        data.tobytes().decode()
    except ValueError:
        whole = data.tobytes()
        bounds = pairwise([0, *ends.tolist()])
        return PackedTexts.of([whole[begin:end].decode(errors="replace") for begin, end in bounds])
    return PackedTexts(data, ends)


def read_header(data: memoryview, path: Path, size: int | None = None) -> Header:
    """Read metadata and tensor descriptions.

    Args:
        data: the first bytes of the file.
        path: the file's name, for messages.
        size: the bytes of the whole file; None if ``data`` is all.

    Raises:
        ShortHeaderError: the header does not end within ``data``.
        CheckpointError: the file is not a GGUF file, or its header contradicts its size.
    """
    cursor = _Cursor(data, path, len(data) if size is None else size)
    if len(data) < len(MAGIC) or bytes(cursor.take(len(MAGIC))) != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {version}; carryall reads little-endian versions 2 and 3"
        )
    tensor_count, field_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text()
        if name in metadata:
            raise damaged(path, f"the metadata '{name}' occurs twice")
        metadata[name] = cursor.value(cursor.number("<I"))
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise damaged(path, "a tensor's name occurs twice")
    start = _data_start(cursor, metadata)
    placed = tuple(_placed(tensor, start, cursor) for tensor in tensors)
    for one, after in pairwise(sorted(placed, key=lambda tensor: tensor.begin)):
        if one.begin + one.size > after.begin:
            raise damaged(path, f"the tensors '{one.name}' and '{after.name}' overlap")
    return Header(metadata, placed)


def _data_start(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise damaged(cursor.path, f"its alignment is {alignment!r}, no power of two")
    return -(-cursor.position // alignment) * alignment


def _tensor(cursor: _Cursor) -> TensorInfo:
    """Read one tensor description; ``begin`` is relative to the start of the data."""
    name, dimensions = cursor.text(), cursor.number("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise damaged(cursor.path, f"tensor '{name}' has {dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise damaged(cursor.path, f"tensor '{name}' has an axis of size 0: {list(shape)}")
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in TYPES:
        raise damaged(cursor.path, f"tensor '{name}' has the type {number}, which is not known")
    kind = TYPES[number]
    if shape[-1] % kind.weights:
        raise damaged(cursor.path, f"tensor '{name}' has rows of {shape[-1]}, no multiple of {kind.weights}")
    return TensorInfo(name, kind.name, shape, offset, math.prod(shape) // kind.weights * kind.bytes)


def _placed(tensor: TensorInfo, start: int, cursor: _Cursor) -> TensorInfo:
    begin = start + tensor.begin
    if begin + tensor.size > cursor.size:
        end = begin + tensor.size
        raise damaged(cursor.path, f"tensor '{tensor.name}' ends at byte {end} of {cursor.size}")
    return TensorInfo(tensor.name, tensor.type_name, tensor.shape, begin, tensor.size)


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error of a damaged file."""
    return CheckpointError(f"{path} is damaged: {what}; download it again")
