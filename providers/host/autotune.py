"""Measure what this machine is fastest with: the kernels' instruction set, and the number of threads.

A default is replaced only by what is 5 % faster, so that noise changes nothing.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from ...errors import UsageError
from ...graph_opt.graph.saving import save_model
from ...graph_opt.lower.products.quantized_linear import DOMAIN
from ...graph_opt.lower.products.tiles import COLUMNS, LAYOUT, MIDDLE, tile_bytes
from ...storage.scratch import scratch_folder
from ..native.library import ISA_VARIABLE, PORTABLE, kernel_library, load
from . import machine
from .tuning import Tuning, hardware_threads, store_tuning

ROWS = (1, 128)  # a decoding step and a prompt
_GAIN = 1.05  # a default is replaced by what is so many times as fast in the mean,
_LOSS = 0.98  # and nowhere slower than this
_SIZE, _BLOCK, _BITS, _LAYERS = 2048, 32, 4, 12  # 30 MB of weights, more than most caches hold
_ROUNDS, _WARM_UP = 6, 2
K = TypeVar("K")


def tune(open_session: Callable[[Path, int], Any]) -> Tuning:
    """Measure for about 3 seconds, and keep the result.

    Args:
        open_session: opens a graph with the CPU provider and a number of threads.

    Raises:
        ProviderUnavailableError: the kernels are not built.
        UsageError: an instruction set is forced by the environment, or the cache folder cannot be used.
    """
    if stated := os.environ.get(ISA_VARIABLE):
        raise UsageError(f"{ISA_VARIABLE}={stated} forces an instruction set; unset it to measure")
    library = kernel_library()
    isas = [isa for isa in library.supported if isa != PORTABLE] or [PORTABLE]
    by_isa = _relative(
        _times({isa: functools.partial(_product, load(library.path), isa) for isa in isas}), isas[0]
    )
    default = machine.usable_cores()
    with scratch_folder() as folder:
        path = folder / "products.onnx"
        save_model(_products(), path)
        sessions = {count: open_session(path, count) for count in _candidates(default)}
        by_count = _relative(
            _times({count: functools.partial(_run, session) for count, session in sessions.items()}), default
        )
        del sessions
    found = Tuning(fastest(by_isa, isas[0]), fastest(by_count, default), by_isa, by_count)
    store_tuning(found)
    return found


def _candidates(default: int) -> list[int]:
    """Return the default, all hardware threads, and, for hybrid processors, half and 3/4 of the cores."""
    return sorted({default, hardware_threads(), max(1, default // 2), max(1, default * 3 // 4)})


def _times(works: Mapping[K, Callable[[int], None]]) -> dict[K, list[float]]:
    """Return the least seconds of each work for each of ``ROWS``, measured in turns."""
    least = {name: [math.inf] * len(ROWS) for name in works}
    for number in range(_WARM_UP + _ROUNDS):
        for name, work in works.items():
            for at, rows in enumerate(ROWS):
                start = time.perf_counter()
                work(rows)
                seconds = time.perf_counter() - start
                if number >= _WARM_UP:
                    least[name][at] = min(least[name][at], seconds)
    return least


def _relative(seconds: Mapping[K, Sequence[float]], default: K) -> dict[K, list[float]]:
    return {
        name: [round(base / own, 3) for base, own in zip(seconds[default], mine, strict=True)]
        for name, mine in seconds.items()
    }


def fastest(gains: Mapping[K, Sequence[float]], default: K) -> K:
    """Return what is 5 % faster than the default in the mean and nowhere 2 % slower, else the default.

    Args:
        gains: candidate -> how many times as fast as the default it is, in each case.
        default: a candidate.
    """
    able = {name: math.prod(found) for name, found in gains.items() if min(found) >= _LOSS}
    best = max(able, key=lambda name: able[name])
    return best if able[best] >= _GAIN ** len(ROWS) else default


@functools.cache
def _tiles() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((_SIZE // COLUMNS, tile_bytes(_SIZE, _BITS, _BLOCK, MIDDLE)), np.uint8)


def _product(functions: ctypes.CDLL, isa: str, rows: int) -> None:
    x, y = np.ones((rows, _SIZE), np.float32), np.empty((rows, _SIZE), np.float32)
    tiles, message = _tiles(), ctypes.create_string_buffer(200)
    sizes = (_SIZE, _SIZE, _BITS, _BLOCK, MIDDLE, 0, rows, _SIZE)
    functions.carryall_linear(
        isa.encode(),
        x.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(rows),
        tiles.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(tiles.nbytes),
        None,
        *map(ctypes.c_int64, sizes),
        y.ctypes.data_as(ctypes.c_void_p),
        message,
        ctypes.c_int64(len(message)),
    )


def _products() -> ir.Model:
    """Return a chain of products with weights of zeros, each with its own bytes."""
    x = ir.val("x", ir.DataType.FLOAT, ["rows", _SIZE])
    attributes = {
        "layout": LAYOUT,
        "inputs": _SIZE,
        "outputs": _SIZE,
        "bits": _BITS,
        "block_size": _BLOCK,
        "group_size": 0,
        "offsets": MIDDLE,
    }
    value: ir.Value = x
    nodes, weights = [], []
    for layer in range(_LAYERS):
        weights.append(ir.Value(name=f"w{layer}", const_value=ir.tensor(_tiles())))
        nodes.append(ir.node("QuantizedLinear", [value, weights[-1]], attributes, domain=DOMAIN))
        value = nodes[-1].outputs[0]
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", _SIZE])
    imports = {"": 21, DOMAIN: 1}
    graph = ir.Graph([x], [value], nodes=nodes, initializers=weights, opset_imports=imports, name="products")
    return ir.Model(graph, ir_version=10)


def _run(session: Any, rows: int) -> None:
    session.run(None, {"x": np.ones((rows, _SIZE), np.float32)})
