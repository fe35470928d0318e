"""Find texts among hundreds of thousands by hashes of their bytes, without an object for each text.

The hash of a text is the polynomial ``sum((byte + 1) * BASE**place)`` modulo 2**64. Hashes of parts of a text
are differences of prefix sums, so the hashes of all parts are found at once (R. M. Karp and M. O. Rabin,
"Efficient randomized pattern-matching algorithms", 1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)


def begins_of(ends: Numbers) -> Numbers:
    """Return where texts begin that end at ``ends``, one behind the other."""
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    return begins


class PartHashes:
    """The hashes of parts of a text.

    Args:
        data: its UTF-8 bytes, uint8 [bytes].
    """

    def __init__(self, data: Bytes) -> None:
        self._sums = np.zeros(len(data) + 1, np.uint64)
        np.cumsum((data + np.uint64(1)) * _powers(_BASE, len(data)), out=self._sums[1:])
        self._inverses = _powers(_INVERSE, len(data) + 1)

    def of(self, begins: Numbers, ends: Numbers) -> Hashes:
        """Return the hashes of the parts between byte positions, uint64 as the positions."""
        hashes: Hashes = (self._sums[ends] - self._sums[begins]) * self._inverses[begins]
        return hashes


class PackedTexts(Sequence[str]):
    """Texts by number, as bytes: 262,144 objects take 0.1 s to make.

    Args:
        data: UTF-8 bytes of all texts, uint8 [bytes].
        ends: where each ends, int64 [texts].
    """

    def __init__(self, data: Bytes, ends: Numbers) -> None:
        self.data, self.ends = data, ends

    @staticmethod
    def of(texts: Sequence[str]) -> PackedTexts:
        """Return texts as bytes."""
        if isinstance(texts, PackedTexts):
            return texts
        encoded = [text.encode() for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        return PackedTexts(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...

    @overload
    def __getitem__(self, number: slice) -> list[str]: ...

    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return list(self.texts(np.arange(len(self))[number]))
        place = range(len(self))[number]
        begin = int(self.ends[place - 1]) if place else 0
        return self.data[begin : int(self.ends[place])].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        return self.texts(np.arange(len(self)))

    def __repr__(self) -> str:
        return repr(list(self))

    def texts(self, numbers: npt.NDArray[np.integer]) -> Iterator[str]:
        """Yield the texts of numbers, int [any]."""
        whole = self.data.tobytes() if len(numbers) > len(self) // 2 else self.data.data
        begins = begins_of(self.ends)[numbers].tolist() if len(numbers) else []
        for begin, end in zip(begins, self.ends[numbers].tolist(), strict=True):
            yield str(whole[begin:end], "utf-8")


class TextTable(PackedTexts):
    """Texts by number, and their numbers by hash.

    Args:
        data: see ``PackedTexts``.
        ends: see ``PackedTexts``.
        order: the numbers of the texts by rising hash, int32 [texts].
        hashes: the hashes in this order, uint64 [texts].
    """

    def __init__(self, data: Bytes, ends: Numbers, order: npt.NDArray[np.int32], hashes: Hashes) -> None:
        super().__init__(data, ends)
        self.order, self.hashes = order, hashes

    @staticmethod
    def of(texts: Sequence[str]) -> TextTable:
        """Return the table of texts."""
        packed = PackedTexts.of(texts)
        hashes = PartHashes(packed.data).of(begins_of(packed.ends), packed.ends)
        order = np.argsort(hashes).astype(np.int32)
        return TextTable(packed.data, packed.ends, order, hashes[order])

    @property
    def twice(self) -> str | None:
        """A text that occurs twice; None if there is none."""
        places = np.flatnonzero(self.hashes[1:] == self.hashes[:-1])
        return None if not len(places) else self[int(self.order[places[0]])]

    def find(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """Return the number of the text of each hash, -1 if there is none, int32 as ``hashes``.

        Texts are not compared: of 2**18 texts and 2**23 lookups, two of unequal text have equal hashes with a
        probability of 2**-23, unless somebody wrote them for that.
        """
        if not len(self):
            return np.full(hashes.shape, -1, np.int32)
        rising = np.argsort(hashes)  # with the search of hashes in this order, 0.4 of the time of any order
        places = np.empty(hashes.shape, np.int64)
        places[rising] = np.minimum(np.searchsorted(self.hashes, hashes[rising]), len(self) - 1)
        return np.where(self.hashes[places] == hashes, self.order[places], -1)

    def number_of(self, text: str) -> int | None:
        """Return the number of a text; None if it is none of these."""
        number = int(self.numbers_of([text])[0])
        return None if number < 0 or self[number] != text else number

    def numbers_of(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the numbers of texts, -1 of unknown ones, int32 [texts]; see ``find``."""
        packed = PackedTexts.of(texts)
        return self.find(PartHashes(packed.data).of(begins_of(packed.ends), packed.ends))

    def parts_of(self, text: str) -> Numbers:
        """Return the numbers of the texts that occur in a text, some of them often, int64 [found]."""
        data = np.frombuffer(text.encode(), np.uint8)
        parts, found = PartHashes(data), [np.zeros(0, np.int64)]
        for length in np.flatnonzero(np.bincount(self.ends - begins_of(self.ends))).tolist():
            if 0 < length <= len(data):
                begins = np.arange(len(data) - length + 1)
                numbers = self.find(parts.of(begins, begins + length))
                found.append(numbers[numbers >= 0].astype(np.int64))
        return np.concatenate(found)

    def cuts(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return (number, left, right) of all pairs of texts whose concatenation is a text, int64 [pairs]."""
        parts, begins = PartHashes(self.data), begins_of(self.ends)
        counts = np.maximum(self.ends - begins - 1, 0)
        owners = np.repeat(np.arange(len(self)), counts)
        middles = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[owners] + 1
        lefts = self.find(parts.of(begins[owners], middles))
        owners, middles, lefts = owners[lefts >= 0], middles[lefts >= 0], lefts[lefts >= 0]
        rights = self.find(parts.of(middles, self.ends[owners]))
        known = rights >= 0
        return owners[known], lefts[known].astype(np.int64), rights[known].astype(np.int64)


def _powers(base: int, count: int) -> Hashes:
    """Return base**0 to base**(count - 1) modulo 2**64; each product doubles how many are known."""
    powers = np.empty(max(1, count), np.uint64)
    powers[0], known, factor = 1, 1, base  # factor is base**known
    while known < count:
        more = powers[known : 2 * known]
        np.multiply(powers[: len(more)], np.uint64(factor), out=more)
        known, factor = 2 * known, factor**2 % 2**64
    return powers[:count]
