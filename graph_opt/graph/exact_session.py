"""What a session of onnxruntime needs so that it computes a graph as written, on every processor.

Apart from ``session.py``: loading a prepared model must not import onnx_ir.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from .integer_sums import exact_sums
from .wrong_fusions import ENTRY, wrong_fusions


def prepare_session(model: str | os.PathLike[str] | bytes, options: Any) -> str | bytes:
    """Return what to open instead of a file or its content, and add entries to the options of its session.

    8-bit sums do not saturate (``integer_sums.py``), and fusions that would change the results are disabled
    (``wrong_fusions.py``), beside those that ``options`` disables already.

    Args:
        model: the file, or serialized ONNX.
        options: ``onnxruntime.SessionOptions``; changed in place.
    """
    source, entries = exact_sums(model)
    disabled = wrong_fusions(model, exact_sums=bool(entries))
    if disabled:
        with contextlib.suppress(RuntimeError):  # the entry is not set
            disabled = (*options.get_session_config_entry(ENTRY).split(";"), *disabled)
        entries = {**entries, ENTRY: ";".join(dict.fromkeys(disabled))}
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    return source
