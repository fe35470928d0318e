"""The largest logits of rows, and tokens drawn from them as ``draw_best`` does, by the library of kernels."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ..base import BestLogits
from .library import find_library, load

_OPTIONS = struct.Struct("=4dQ")  # Options of sources/best_draws.cpp
# It holds Python's lock: a thread that takes it meanwhile would keep it for longer than the draws last.
_DRAW = ctypes.PYFUNCTYPE(None, *[ctypes.c_char_p] * 6, *[ctypes.c_int64] * 2, ctypes.c_void_p)
_LARGEST = ctypes.PYFUNCTYPE(
    None, ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_char_p, *[ctypes.c_void_p] * 3
)


def pack_options(temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> bytes:
    """Return a request's filters, see ``Filters``, and the key of its uniforms, as the library reads them."""
    return _OPTIONS.pack(
        temperature, top_k or math.inf, top_p if top_p < 1.0 else math.inf, min_p or math.ulp(0.0), key
    )


class BestDraws:
    """The largest logits of a step's rows, and a draw from them, without typical-p, XTC and mirostat.

    Weights are rounded by the C library's ``exp`` and not by NumPy's, so a token could be another one where
    its uniform is within 1e-15 of the border between two.

    Args:
        library: file of the library.

    Raises:
        ProviderUnavailableError: it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        functions = load(library)
        self._draw: Any = _DRAW(("carryall_draw_best", functions))
        self._largest: Any = _LARGEST(("carryall_best_logits", functions))

    def largest(
        self, rows: Sequence[npt.NDArray[np.float32]], count: int, summed: Sequence[bool]
    ) -> list[BestLogits]:
        """Return the ``count`` largest logits of each row.

        Args:
            rows: logits [vocab_size], more than ``count``; not to be changed while the result is in use.
            count: at most 256.
            summed: per row, whether its log-sum-exp is wanted. Else it is an upper bound.

        Returns:
            Per row; its ``logsumexp`` is NaN, and all else has no meaning, if a logit is NaN or infinity, or
            fewer than ``count`` are above -infinity.
        """
        rows = [np.ascontiguousarray(row, np.float32) for row in rows]
        tokens, logits = np.empty((len(rows), count), np.int64), np.empty((len(rows), count), np.float32)
        totals = np.empty(len(rows))
        self._largest(
            struct.pack(f"{len(rows)}Q", *[row.ctypes.data for row in rows]),
            len(rows),
            len(rows[0]),
            count,
            bytes(summed),
            logits.ctypes.data,
            tokens.ctypes.data,
            totals.ctypes.data,
        )
        return [
            BestLogits(own_tokens, own, total, len(row), functools.partial(np.asarray, row), exact)
            for row, own_tokens, own, total, exact in zip(
                rows, tokens, logits, totals.tolist(), summed, strict=True
            )
        ]

    def __call__(
        self, rows: Sequence[BestLogits], options: Sequence[bytes], numbers: Sequence[int]
    ) -> list[int]:
        """Return a token for each row; -1 where its largest logits do not decide.

        Args:
            rows: of one step, with at least one logit and finite log-sum-exps.
            options: per row, of ``pack_options``.
            numbers: per row, how many tokens of its request were drawn before.

        Raises:
            ProviderRuntimeError: logits are not float32.
        """
        count, places = len(rows), np.empty(len(rows), np.int64)
        integers, widths = struct.Struct(f"{count}q"), [len(row.logits) for row in rows]
        logits = b"".join([row.logits.data for row in rows])
        if len(logits) != 4 * sum(widths):
            raise ProviderRuntimeError(
                f"a runner returned largest logits of {rows[0].logits.dtype}, not float32"
            )
        self._draw(
            logits,
            integers.pack(*widths),
            struct.pack(f"{count}d", *[row.logsumexp for row in rows]),
            bytes([row.exact for row in rows]),
            b"".join(options),
            integers.pack(*numbers),
            count,
            rows[0].vocab_size,
            places.ctypes.data,
        )
        return [
            row.token_ids.item(place) if place >= 0 else -1
            for row, place in zip(rows, places.tolist(), strict=True)
        ]


@functools.cache
def best_draws() -> BestDraws | None:
    """Return the library's draw; None if the library is not built.

    Raises:
        ProviderUnavailableError: the library is damaged or cannot be loaded.
    """
    library = find_library()
    return None if library is None else BestDraws(library)
