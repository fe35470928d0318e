"""Call the recurrent kernels of a library without onnxruntime, with states in the layout of recurrent.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.providers.native.library import load

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _DeltaCall(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("heads", "key_heads", "key_size", "value_size", "by_key", "bfloat16")),
        *((name, _INT) for name in ("rows", "tokens", "states_count")),
        ("scale", ctypes.c_float),
        *((name, _POINTER) for name in ("query", "key", "value", "decay", "beta", "states", "begins")),
        *((name, _POINTER) for name in ("places", "output")),
    ]


class _ConvolutionCall(ctypes.Structure):
    _fields_ = [
        *((name, _INT) for name in ("channels", "taps", "silu", "rows", "tokens", "states_count")),
        *((name, _POINTER) for name in ("x", "weights", "bias", "states", "begins", "places", "output")),
    ]


@dataclass
class Delta:
    """Inputs of the delta rule: query and key [tokens, key heads, size], value [tokens, heads, size], decay
    [tokens, heads] or [tokens, heads, key size], beta [tokens, heads] or None, states [places, heads, key
    size, value size], or in the layout of the kernels [places, heads, lines, 16]; ``bfloat16``: whether the
    kernels store them so."""

    query: Floats
    key: Floats
    value: Floats
    decay: Floats
    beta: Floats | None
    states: Floats
    scale: float = 1.0
    bfloat16: bool = False

    def tokens(self, part: slice) -> Delta:
        """Some of the tokens, with the same states."""
        beta = None if self.beta is None else self.beta[part]
        arrays = self.query[part], self.key[part], self.value[part], self.decay[part], beta
        return Delta(*arrays, self.states, self.scale, self.bfloat16)


def _lines(keys: int, values: int, *, bfloat16: bool) -> list[int]:
    """Return the ends, in lines of 16 floats, of the parts of a head: states, held key, its decays, its d."""
    key, content = -(-keys // 16), values // 16 * keys
    parts = [-(-content // 2) if bfloat16 else content, key, key, values // 16]
    ends: list[int] = np.cumsum(parts).tolist()
    return ends


def rounded(states: Floats) -> Floats:
    """Return float32 that are rounded to bfloat16, ties to even."""
    bits = states.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def tiled(states: Floats, *, bfloat16: bool = False) -> Floats:
    """Return states [places, heads, key, value] in the layout of the kernels, with no held token."""
    places, heads, keys, values = states.shape
    ends = _lines(keys, values, bfloat16=bfloat16)
    lines = np.zeros((places, heads, ends[-1] + 1, 16), np.float32)
    tiles = states.reshape(places, heads, keys, values // 16, 16).swapaxes(2, 3).reshape(places, heads, -1)
    if bfloat16:
        halves = (rounded(np.ascontiguousarray(tiles)).view(np.uint32) >> 16).astype(np.uint16)
        content = lines.reshape(places, heads, -1).view(np.uint16)
        content[:, :, : halves.shape[2]] = halves
    else:
        lines[:, :, : ends[0]] = tiles.reshape(places, heads, -1, 16)
    return lines


def stored(lines: Floats, keys: int, values: int, *, bfloat16: bool = False) -> Floats:
    """Return the states [places, heads, key, value] without the token that is held beside them."""
    places, heads = lines.shape[:2]
    flat, size = lines.reshape(places, heads, -1), keys * values
    if bfloat16:
        halves = np.ascontiguousarray(flat).view(np.uint16)[:, :, :size].astype(np.uint32)
        flat = (halves << 16).view(np.float32)
    tiles = flat[:, :, :size].reshape(places, heads, values // 16, keys, 16).swapaxes(2, 3)
    return tiles.reshape(places, heads, keys, values)


def untiled(lines: Floats, keys: int, values: int, *, bfloat16: bool = False) -> Doubles:
    """Return the states [places, heads, key, value] after the token that is held beside them, if any."""
    places, heads = lines.shape[:2]
    ends = _lines(keys, values, bfloat16=bfloat16)
    _, key, decay, d, count = (
        part.reshape(places, heads, -1).astype(np.float64) for part in np.split(lines, ends, axis=2)
    )
    states = stored(lines, keys, values, bfloat16=bfloat16).astype(np.float64)
    factors = decay[..., :keys, None] if decay[..., 1:].any() else decay[..., :1, None]
    after = factors * states + key[..., :keys, None] * d[..., None, :]
    return np.where(count[..., :1, None] > 0, after, states)


def delta_rule(
    library: Path, isa: str, case: Delta, lengths: list[int], places: list[int]
) -> tuple[Floats, Floats]:
    """Return the outputs [tokens, heads, value size] and the states after all rows, as the kernels keep them.

    Raises:
        ValueError: the kernels refuse the arguments.
    """
    tokens, heads, size = case.value.shape
    whole = case.states.shape[2:] == (case.query.shape[2], size)
    states = case.states.copy() if not whole else tiled(case.states, bfloat16=case.bfloat16)
    output = np.full(case.value.shape, np.nan, np.float32)
    begins = np.cumsum([0, *lengths]).astype(np.int32)
    own = np.array(places, np.int32)
    arrays = [case.query, case.key, case.value, case.decay, case.beta, states, begins, own, output]
    held = [None if array is None else np.ascontiguousarray(array) for array in arrays]
    call = _DeltaCall(
        *(heads, case.query.shape[1], case.query.shape[2], size, case.decay.ndim == 3, case.bfloat16),
        *(len(lengths), tokens, len(states), case.scale),
        *(None if array is None else array.ctypes.data for array in held),
    )
    _call(load(library).carryall_delta_rule, isa, call)
    return output, states


def convolution(
    library: Path,
    isa: str,
    x: Floats,
    weights: Floats,
    bias: Floats | None,
    states: Floats,
    lengths: list[int],
    places: list[int],
    *,
    silu: bool,
) -> tuple[Floats, Floats]:
    """Return the outputs [tokens, channels] and the states [places, taps - 1, channels] after all rows.

    Args:
        library: the library.
        isa: the instruction set.
        x: [tokens, channels].
        weights: [taps, channels].
        bias: [channels].
        states: [places, taps - 1, channels].
        lengths: tokens of each row.
        places: state of each row.
        silu: whether SiLU follows.

    Raises:
        ValueError: the kernels refuse the arguments.
    """
    states, output = states.copy(), np.full(x.shape, np.nan, np.float32)
    begins, own = np.cumsum([0, *lengths]).astype(np.int32), np.array(places, np.int32)
    arrays = [x, weights, bias, states, begins, own, output]
    held = [None if array is None else np.ascontiguousarray(array) for array in arrays]
    call = _ConvolutionCall(
        *(x.shape[1], len(weights), silu, len(lengths), len(x), len(states)),
        *(None if array is None else array.ctypes.data for array in held),
    )
    _call(load(library).carryall_convolution, isa, call)
    return output, states


def _call(function: Any, isa: str, call: ctypes.Structure) -> None:
    message = ctypes.create_string_buffer(200)
    if function(isa.encode(), ctypes.byref(call), message, _INT(len(message))):
        raise ValueError(message.value.decode())
