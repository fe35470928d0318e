"""Blocks of the KV caches of carryall's ``PagedAttention`` on the host, in reserved address space.

The layout within a block is that of ``providers/native/sources/attention.h``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...records import dataclass
from ..base import KVEviction
from .kv_blocks import chosen_rows
from .kv_memory import reserve

Array = npt.NDArray[Any]
_LANES = 16  # positions of a group
_PAIRED = 2 * _LANES  # positions, or elements of a head, of a tile of pairs
_QUAD = 4  # elements or positions whose bytes of int8 lie side by side
_MIDDLE = 128  # a byte of int8 is a value plus this
_BYTE = np.dtype(np.uint8)
_ELEMENTS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of one cache, [heads, size, row_bytes] bytes.

    Args:
        heads: KV heads.
        size: positions.
        row_bytes: bytes of a position in one head.
        window: the sliding window in tokens, including the token itself; 0 is none.
        paired: whether the kernel holds pairs of bfloat16, see its ``attention.h``.
        group: the index of its group of layers, whose block table its layers read.
        compressed: whether it holds the keys of a layer, stored as values, which they are too.
    """

    heads: int
    size: int
    row_bytes: int
    window: int = 0
    paired: bool = False
    group: int = 0
    compressed: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this cache."""
        return self.heads * self.row_bytes


class BlockMemory:
    """The caches of a model, [blocks, heads, size, row_bytes] bytes each.

    Args:
        shapes: a block of each cache, by name; keys and values of a layer follow each other, or one is both.
        blocks: number of blocks.
        cache_type: ``float32``, ``bfloat16`` or ``int8``.

    Raises:
        ProviderRuntimeError: the address space cannot be reserved.
    """

    def __init__(self, shapes: Mapping[str, BlockShape], blocks: int, cache_type: str) -> None:
        self.shapes = dict(shapes)
        self._type = cache_type
        self.caches: dict[str, npt.NDArray[np.uint8]] = {}
        for name, shape in shapes.items():
            flat = np.frombuffer(reserve(name, blocks * shape.size * shape.bytes_per_token), np.uint8)
            self.caches[name] = flat.reshape(blocks, shape.heads, shape.size, shape.row_bytes)
        self._targets = [  # of ``write``
            (cache.data.cast("B"), cache.strides[0], cache.shape[1:], shapes[name].group)
            for name, cache in self.caches.items()
        ]

    @property
    def layout(self) -> str:
        """What ``read`` returns, for ``RunnerInfo.kv_layout``."""
        shapes = (
            f"{name} {list(cache.shape[1:])}{_layout_of(self.shapes[name])}"
            for name, cache in self.caches.items()
        )
        return f"carryall blocks 2 {self._type}: {'; '.join(shapes)}"

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block in all caches of a group."""
        for name, cache in self.caches.items():
            if self.shapes[name].group == group:
                cache[target] = cache[source]

    def read(self, blocks: Sequence[Sequence[int]]) -> list[Array]:
        """Return the content of blocks, listed by group: one array [blocks, ...] per cache."""
        spans = [_span(group) for group in blocks]
        parts = [cache[spans[self.shapes[name].group]] for name, cache in self.caches.items()]
        return [part if part.base is None else part.copy() for part in parts]

    def write(self, blocks: Sequence[Sequence[int]], parts: Sequence[Array]) -> None:
        """Write the result of ``read``.

        Memory views copy without releasing the interpreter's lock, which takes a microsecond for each. NumPy
        releases it for every copy, and then waits for the threads that read and check the next chunks.

        Raises:
            ValueError: the parts have other shapes.
        """
        runs = [list(_runs(group)) for group in blocks]
        for (flat, size, shape, group), part in zip(self._targets, parts, strict=True):
            if part.shape != (len(blocks[group]), *shape) or part.dtype != _BYTE:
                raise ValueError(f"a cache has blocks of {shape} bytes, not {part.shape} {part.dtype}")
            content = np.ascontiguousarray(part).data.cast("B")
            for place, block, count in runs[group]:
                target = slice(block * size, (block + count) * size)
                flat[target] = content[place * size : (place + count) * size]

    def evict_kv(
        self,
        blocks: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        held: int,
        eviction: KVEviction,
    ) -> None:
        """Move the kept rows of ``blocks`` to the first rows of ``targets``; see ``BlockLayer.evict_kv``."""
        first, last = eviction.sinks, held - eviction.recent
        left = iter(self.shapes.items())
        for keys, shape in left:
            values = keys if shape.compressed else next(left)[0]
            own_blocks, heads = blocks[shape.group], shape.heads
            chosen = chosen_rows(self._rows(keys, own_blocks, held), eviction, windowed=shape.window > 0)
            ends = [np.tile(np.arange(*end), (heads, 1)) for end in ((0, first), (last, held))]
            kept = np.concatenate([ends[0], chosen, ends[1]], axis=1)
            source = self._places(keys, own_blocks, kept)
            rows = np.tile(np.arange(eviction.kept), (heads, 1))
            target = self._places(keys, targets[shape.group], rows)
            views = [] if shape.compressed else self._views(keys, keys=True)
            for view in [*views, *self._views(values, keys=False)]:
                view[target] = view[source]

    def _places(self, name: str, blocks: Sequence[int], rows: Array) -> tuple[Array, ...]:
        """Return indices into ``_views`` of rows [heads, n] of a sequence."""
        size, heads = self.shapes[name].size, np.arange(len(rows))[:, None]
        within = rows % size
        block = np.array(blocks)[rows // size]
        if self.shapes[name].paired:
            return block, heads, within // _PAIRED, within % _PAIRED // _LANES, within % _LANES
        if self._type == "int8":
            return block, heads, within // _LANES, within % _LANES // _QUAD, within % _QUAD
        return block, heads, within // _LANES, within % _LANES

    def _views(self, name: str, *, keys: bool) -> list[Array]:
        """Return views of a cache that ``_places`` indexes: elements, and scales of int8 rows."""
        cache = self.caches[name]
        if self.shapes[name].paired:
            return [_pairs(cache, 2 if self._type == "float32" else 1, keys=keys)]
        groups = cache.reshape(*cache.shape[:2], -1, _LANES * cache.shape[3])
        if self._type == "int8":
            scales = groups[..., : 4 * _LANES].view(np.float32)
            return [
                _quads(groups[..., 4 * _LANES :], keys=keys),
                scales.reshape(*scales.shape[:-1], -1, _QUAD),
            ]
        content = groups.view(_ELEMENTS[self._type])
        width = content.shape[-1] // _LANES
        lead = content.shape[:-1]
        if keys:
            return [content.reshape(*lead, width, _LANES).swapaxes(-1, -2)]
        return [content.reshape(*lead, _LANES, width)]

    def _rows(self, name: str, blocks: Sequence[int], held: int) -> Array:
        """Return keys [heads, held, width] as floats; for a windowed layer [heads, held, 0]."""
        shape = self.shapes[name]
        if shape.window:
            return np.empty((shape.heads, held, 0), np.float32)
        places = self._places(name, blocks, np.tile(np.arange(held), (shape.heads, 1)))
        parts = [view[places].astype(np.float32) for view in self._views(name, keys=not shape.compressed)]
        if self._type == "int8":  # [..., width / 4, 4]; the transform of keys leaves angles as they are
            return (parts[0].reshape(*places[0].shape, -1) - _MIDDLE) * parts[1][..., None]
        if shape.paired:  # [..., width / 32, planes, 16, 2]
            summed: Array = parts[0].sum(-3)
            return summed.swapaxes(-1, -2).reshape(*places[0].shape, -1)
        return parts[0]


def _layout_of(shape: BlockShape) -> str:
    return " in pairs" if shape.paired else " as values" if shape.compressed else ""


def _span(blocks: Sequence[int]) -> slice | list[int]:
    """Return an index of blocks: a slice if they follow each other, which is copied twice as fast."""
    begin, end = (blocks[0], blocks[0] + len(blocks)) if blocks else (0, 0)
    return slice(begin, end) if list(blocks) == list(range(begin, end)) else list(blocks)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield blocks that follow each other: the place of the first one, the block, and how many they are."""
    place = 0
    for i, block in enumerate(blocks, 1):
        if i == len(blocks) or blocks[i] != block + 1:
            yield place, blocks[place], i - place
            place = i


def _quads(groups: npt.NDArray[np.uint8], *, keys: bool) -> Array:
    """Return a view [..., lanes / 4, 4, elements of a position ...] of groups of int8 keys or values."""
    lead, width, quads = groups.shape[:-1], groups.shape[-1] // _LANES, _LANES // _QUAD
    if keys:
        return np.moveaxis(groups.reshape(*lead, width // _QUAD, quads, _QUAD, _QUAD), -4, -2)
    return np.moveaxis(groups.reshape(*lead, width // _LANES, quads, _LANES, _QUAD), (-3, -1), (-4, -3))


def _pairs(cache: npt.NDArray[np.uint8], planes: int, *, keys: bool) -> Array:
    """Return a view [blocks, heads, size / 32, 2, 16, elements of a position ...] of a cache of pairs."""
    flat = cache.reshape(*cache.shape[:2], -1).view(ml_dtypes.bfloat16)
    width = cache.shape[3] // (2 * planes)
    tile = (planes, _LANES, _LANES, 2)
    lead = (*cache.shape[:2], cache.shape[2] // _PAIRED)
    if keys:
        return np.moveaxis(flat.reshape(*lead, 2, width // _PAIRED, *tile), 7, 4)
    return np.moveaxis(flat.reshape(*lead, width // _LANES, *tile), (7, 5), (3, 4))
