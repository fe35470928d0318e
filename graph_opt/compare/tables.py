"""Find the rows of lookup tables that differ between two graphs.

Random indices miss most rows of a large table, so a comparison includes the changed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..graph.lazy import shape_of
from .input_facts import table_readers

_MAX_ROWS = 256


def changed_rows(reference: ir.Graph, candidate: ir.Graph) -> dict[str, list[int]]:
    """Return the differing rows of tables by the input that indexes them, at most 256 per input.

    Tables with different types or shapes are not compared.
    """
    candidate_tables = {str(value.name): _tables(value) for value in candidate.inputs}
    changed = {}
    for value in reference.inputs:
        pairs = zip(_tables(value), candidate_tables.get(str(value.name), []), strict=False)
        rows = sorted({row for pair in pairs for row in _different(*pair)})
        if rows:
            changed[str(value.name)] = _spread(rows)
    return changed


def _tables(value: ir.Value) -> list[ir.TensorProtocol]:
    """Return the tables that an integer input indexes, sorted by name."""
    if value.dtype is None or not value.dtype.is_integer():
        return []
    values = sorted(table_readers(value), key=lambda table: str(table.name))
    return [table.const_value for table in values if table.const_value is not None]


def _different(left: ir.TensorProtocol, right: ir.TensorProtocol) -> list[int]:
    if shape_of(left) != shape_of(right) or left.dtype != right.dtype or not shape_of(left):
        return []
    a, b = (tensor.numpy().reshape(shape_of(left)[0], -1) for tensor in (left, right))
    rows: list[int] = np.flatnonzero((a != b).any(axis=1)).tolist()
    return rows


def _spread(rows: Sequence[int]) -> list[int]:
    places = np.linspace(0, len(rows) - 1, min(len(rows), _MAX_ROWS)).astype(int)
    return [rows[place] for place in places]
