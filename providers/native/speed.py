"""How fast this machine computes products with tiles in memory, which bounds the speed of decoding."""

from __future__ import annotations

import ctypes
import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ProviderRuntimeError
from ...graph_opt.lower.kernels import StoredForm
from ...graph_opt.lower.products.half_products import float_tile_bytes
from ...graph_opt.lower.products.stored_tiles import HALF_MIDDLE, stored_tile_bytes
from ...graph_opt.lower.products.tiles import COLUMNS, tile_bytes
from ...records import dataclass
from .library import load

_BYTES = 24 << 20  # of a thread, more than its share of any cache
_NUMBERS = 0x3F  # a byte of which tiles consist: floats and halves made of it are normal numbers
_TASK_TILES = 16


@dataclass(frozen=True, slots=True)
class ProductForm:
    """Tiles of one form, with the attributes of ``QuantizedLinear``.

    Args:
        inputs: inputs of the weight.
        bits: bits of a value.
        block_size: inputs with one scale.
        group_size: inputs whose blocks have multiples of one scale; 0 for free scales.
        offsets: what values are relative to.
    """

    inputs: int
    bits: int
    block_size: int
    group_size: int
    offsets: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        if self.bits >= 16:
            return float_tile_bytes(self.inputs, self.bits)
        if self.offsets >= HALF_MIDDLE:
            form = StoredForm(self.bits, self.block_size, self.group_size, self.offsets)
            return stored_tile_bytes(form, self.inputs)
        return tile_bytes(self.inputs, self.bits, self.block_size, self.offsets, self.group_size)


@functools.cache
def seconds_per_byte(
    library: Path, form: ProductForm, rows: int, threads: int, seconds: float = 0.15
) -> float:
    """Measure the time of a product per byte of its tiles, the best of several passes.

    Args:
        library: the file of the kernels.
        form: the form of the tiles, which are larger than the caches.
        rows: rows of activations.
        threads: threads that compute parts of the outputs at the same time.
        seconds: how long passes are repeated.

    Raises:
        ProviderRuntimeError: the kernels refuse the form.
    """
    tiles = max(1, _BYTES // form.tile_bytes)
    data = np.full((threads, tiles * form.tile_bytes), _NUMBERS, np.uint8)
    x, y = np.ones((rows, form.inputs), np.float32), np.empty((threads, rows, tiles * COLUMNS), np.float32)
    function = load(library).carryall_linear

    def multiply(thread: int) -> None:  # outside of Python's lock
        message = ctypes.create_string_buffer(200)
        sizes = (form.inputs, tiles * COLUMNS, form.bits, form.block_size, form.offsets, form.group_size)
        arrays = (_pointer(x), rows, _pointer(data[thread]), data[thread].nbytes, None)
        steps = (rows, _TASK_TILES)
        if function(None, *arrays, *sizes, *steps, _pointer(y[thread]), message, len(message)):
            raise ProviderRuntimeError(f"the kernels cannot be measured: {message.value.decode()}")

    best, deadline = math.inf, math.inf
    with ThreadPoolExecutor(threads) as pool:
        while best == math.inf or time.perf_counter() < deadline:
            start = time.perf_counter()
            list(pool.map(multiply, range(threads)))
            best = min(best, time.perf_counter() - start)
            deadline = min(deadline, start + seconds)
    return best / data.nbytes


def _pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
