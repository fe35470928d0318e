"""Round float matrices to blocks of 4 or 8 bits by the library of kernels, with the bits of NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph_opt.graph.lazy import Array
from ...graph_opt.quantize.algorithms.arithmetic import Arithmetic
from ...graph_opt.quantize.algorithms.blockwise import (
    FINE_SHRINKS,
    SHRINKS,
    BlockFormat,
    Floats,
    Quantized,
    Quantizer,
)
from ...graph_opt.quantize.algorithms.cores import on_all_cores
from ...graph_opt.quantize.algorithms.grouped import FACTORS, Scales
from ...graph_opt.quantize.algorithms.kquant import STEPS
from ...graph_opt.quantize.algorithms.sweep import SweepScales
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
        ("importance", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("unit_count", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("value_input_step", "value_output_step")),
        ("scales", ctypes.c_void_p),
        ("zero_points", ctypes.c_void_p),
        ("multiples", ctypes.c_void_p),
    )


class _Sweep(ctypes.Structure):
    """The struct of the same name in ``sources/sweep.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "levels")),
        *((name, ctypes.c_int64) for name in ("left_step", "levels_step", "rows", "outputs")),
        ("matrix", ctypes.c_void_p),
        ("matrix_step", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scales", "zero_points", "blocks")),
        *((name, ctypes.c_float) for name in ("low", "high")),
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
        lines = self.algorithm == "kquant"
        tried = STEPS if lines else SHRINKS[form.bits]
        values, scales, zero_points, _ = self._rounded(weight, form, tried, _LINES if lines else _RANGES)
        return Quantized(values, scales, zero_points)

    def starting_scales(self, weight: Floats, form: BlockFormat, importance: Floats) -> Scales:
        """Return ``grouped.starting_scales``.

        Raises:
            GraphError: the matrix holds NaN, infinity, or weights whose squares exceed float32.
        """
        weights = np.ascontiguousarray(importance, np.float32)
        _, scales, zero_points, multiples = self._rounded(weight, form, FINE_SHRINKS, _RANGES, weights)
        zeros = np.zeros_like(scales) if zero_points is None else zero_points.astype(np.float32)
        return Scales(scales, zeros, multiples)

    def sweep(
        self,
        left: Floats,
        levels: Floats,
        grid: SweepScales,
        matrix: Floats,
        form: BlockFormat,
    ) -> None:
        """Sweep a panel, see ``algorithms.sweep.Panel``; the rows of all arrays must be contiguous.

        Raises:
            GraphError: it has more inputs than a panel.
        """
        scales, zeros = (np.ascontiguousarray(one, np.float32) for one in (grid.scales, grid.zero_points))
        blocks = np.ascontiguousarray(grid.blocks, np.int64)
        sweep = _Sweep(
            left=left.ctypes.data,
            levels=levels.ctypes.data,
            left_step=left.strides[0] // left.itemsize,
            levels_step=levels.strides[0] // levels.itemsize,
            rows=len(left),
            outputs=left.shape[1],
            matrix=matrix.ctypes.data,
            matrix_step=matrix.strides[0] // matrix.itemsize,
            scales=scales.ctypes.data,
            zero_points=zeros.ctypes.data,
            blocks=blocks.ctypes.data,
            low=form.low,
            high=form.high,
        )
        self._run(load(self.library).carryall_sweep, sweep, left.shape[1], left.size)

    def _rounded(
        self,
        weight: Floats,
        form: BlockFormat,
        ranges: Sequence[float],
        search: int,
        importance: Floats | None = None,
    ) -> tuple[Array, Floats, Array | None, Floats | None]:
        """Return values, scales, zero points of unsigned values, and the multiples of the units of groups."""
        floats = np.asarray(weight, np.float32)
        stored = np.int8 if form.symmetric else np.uint8
        values = np.empty_like(floats, stored, subok=False)  # in the order of ``weight``, row or column major
        shape = (len(floats) // form.block_size, floats.shape[1])
        scales = np.empty(shape, np.float32)
        zero_points = None if form.symmetric else np.empty(shape, stored)
        group = 0 if form.symmetric else form.group_size
        multiples = np.empty(shape, np.float32) if group else None
        tried, units = _doubles(ranges), _doubles(FACTORS)
        rounding = _Rounding(
            weights=floats.ctypes.data,
            input_step=floats.strides[0] // floats.itemsize,
            output_step=floats.strides[1] // floats.itemsize,
            inputs=len(floats),
            outputs=floats.shape[1],
            bits=form.bits,
            block=form.block_size,
            group=group,
            is_signed=form.symmetric,
            search=search,
            importance=_address(importance),
            ranges=tried.ctypes.data,
            range_count=len(tried),
            units=units.ctypes.data,
            unit_count=len(units),
            values=values.ctypes.data,
            value_input_step=values.strides[0],
            value_output_step=values.strides[1],
            scales=scales.ctypes.data,
            zero_points=_address(zero_points),
            multiples=_address(multiples),
        )
        self._run(load(self.library).carryall_round, rounding, floats.shape[1], floats.size)
        return values, scales, zero_points, multiples

    def _run(self, function: Callable[..., int], task: ctypes.Structure, outputs: int, size: int) -> None:
        address, isa = ctypes.addressof(task), None if self.isa is None else self.isa.encode()

        def run(first: int) -> int:  # outside of Python's lock
            return int(function(isa, address, first, min(first + _COLUMNS, outputs)))

        firsts = range(0, outputs, _COLUMNS)
        outcomes = set(map(run, firsts) if size <= _SMALL else on_all_cores(run, firsts))
        if wrong := [_OUTCOMES[outcome] for outcome in sorted(outcomes) if outcome]:
            raise GraphError(wrong[0])


def native_quantizer(algorithm: str) -> Quantizer | None:
    """Return the library's routine of an algorithm, None if it has none or is not built.

    Raises:
        ProviderUnavailableError: the library is damaged or cannot be loaded.
    """
    library = find_library() if algorithm in ("rtn", "kquant") else None
    return None if library is None else BlockRounding(library, algorithm)


def native_arithmetic() -> Arithmetic:
    """Return the inner loops of the calibrated algorithms: the library's, or NumPy's if it is not built.

    Raises:
        ProviderUnavailableError: the library is damaged or cannot be loaded.
    """
    library = find_library()
    if library is None:
        return Arithmetic()
    kernels = BlockRounding(library, "rtn")
    return Arithmetic(kernels, kernels.starting_scales, kernels.sweep)


def _doubles(values: Sequence[float]) -> Any:
    return np.array(values, np.float64)


def _address(array: Array | None) -> int | None:
    return None if array is None else array.ctypes.data
