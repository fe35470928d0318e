"""Round float matrices to blocks of 4 or 8 bits by the library of kernels, on all cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph_opt.quantize.algorithms.blockwise import SHRINKS, BlockFormat, Floats, Quantized, Quantizer
from ...graph_opt.quantize.algorithms.grouped import FACTORS
from ...graph_opt.quantize.algorithms.kquant import STEPS
from ...records import dataclass
from .library import find_library, load

_RANGES, _LINES = 0, 1  # Search of sources/rounding.h
# Outcome of sources/rounding.h
_OUTCOMES = (
    "",
    "it holds NaN or infinity",
    "it holds weights that are too large to quantize",
    "the kernels do not round matrices of its size",
)
_COLUMNS = 128  # outputs of a task
_SMALL = 1 << 16  # weights of a matrix that one thread rounds


class _Rounding(ctypes.Structure):
    """The struct of the same name in ``sources/rounding.h``."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("input_step", "output_step")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "bits", "block", "group")),
        ("is_signed", ctypes.c_bool),
        ("search", ctypes.c_int64),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("unit_count", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("value_input_step", "value_output_step")),
        ("scales", ctypes.c_void_p),
        ("zero_points", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class BlockRounding:
    """A quantizer that gives the bits of an algorithm in NumPy.

    NumPy sums a matrix with a single output in another order, so bits of such matrices may differ.

    Args:
        library: the file of the kernels.
        algorithm: ``rtn`` or ``kquant``.
        isa: the instruction set; None for the one in use.
    """

    library: Path
    algorithm: str
    isa: str | None = None

    def __call__(self, weight: Floats, form: BlockFormat) -> Quantized:
        """Quantize a matrix [in, out] in blocks along its first axis, as ``round_to_nearest`` or ``kquant``.

        Raises:
            GraphError: the matrix holds NaN, infinity, or weights whose squares exceed float32.
        """
        floats = np.asarray(weight, np.float32)
        stored = np.int8 if form.symmetric else np.uint8
        values = np.empty_like(floats, stored, subok=False)  # in the order of ``weight``, row or column major
        shape = (len(floats) // form.block_size, floats.shape[1])
        scales = np.empty(shape, np.float32)
        zero_points = None if form.symmetric else np.empty(shape, stored)
        lines = self.algorithm == "kquant"
        tried, units = _doubles(STEPS if lines else SHRINKS[form.bits]), _doubles(FACTORS)
        rounding = _Rounding(
            weights=floats.ctypes.data,
            input_step=floats.strides[0] // floats.itemsize,
            output_step=floats.strides[1] // floats.itemsize,
            inputs=len(floats),
            outputs=floats.shape[1],
            bits=form.bits,
            block=form.block_size,
            group=0 if form.symmetric else form.group_size,
            is_signed=form.symmetric,
            search=_LINES if lines else _RANGES,
            ranges=tried.ctypes.data,
            range_count=len(tried),
            units=units.ctypes.data,
            unit_count=len(units),
            values=values.ctypes.data,
            value_input_step=values.strides[0],
            value_output_step=values.strides[1],
            scales=scales.ctypes.data,
            zero_points=None if zero_points is None else zero_points.ctypes.data,
        )
        self._run(rounding, floats.size)
        return Quantized(values, scales, zero_points)

    def _run(self, rounding: _Rounding, size: int) -> None:
        function, address = load(self.library).carryall_round, ctypes.addressof(rounding)
        isa = None if self.isa is None else self.isa.encode()

        def run(first: int) -> int:  # outside of Python's lock
            return int(function(isa, address, first, min(first + _COLUMNS, rounding.outputs)))

        firsts = range(0, rounding.outputs, _COLUMNS)
        if size <= _SMALL:
            outcomes = set(map(run, firsts))
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                outcomes = set(pool.map(run, firsts))
        if wrong := [_OUTCOMES[outcome] for outcome in sorted(outcomes) if outcome]:
            raise GraphError(wrong[0])


def native_quantizer(algorithm: str) -> Quantizer | None:
    """Return the library's routine of an algorithm, None if it has none or is not built.

    Raises:
        ProviderUnavailableError: the library is damaged or cannot be loaded.
    """
    library = find_library() if algorithm in ("rtn", "kquant") else None
    return None if library is None else BlockRounding(library, algorithm)


def _doubles(values: Sequence[float]) -> Any:
    return np.array(values, np.float64)
