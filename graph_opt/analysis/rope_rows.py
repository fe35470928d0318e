"""Gather the rows of cos and sin tables at each token's position, as RotaryEmbedding needs them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS
from ..graph.edit import insert, static_size
from .decoder_inputs import decoder_input
from .probe import Probe, sample_lengths
from .region import Array

_BATCH = 2
_STEPS = 6


class RopeRows:
    """Gathers rows of tables, once per table and positions.

    Args:
        graph: a decoder graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rows: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def at(self, before: ir.Node, table: ir.Value, positions: ir.Value | None) -> ir.Value:
        """Return the rows [batch, sequence, rotary_dim / 2] of a table [length, rotary_dim / 2].

        Args:
            before: a node that reads the rows.
            table: the cos or sin table.
            positions: [batch, sequence]; by default the graph's ``position_ids``.
        """
        positions = positions if positions is not None else decoder_input(self._graph, POSITION_IDS)
        key = (table, positions)
        if key not in self._rows:
            self._rows[key] = self._unflattened(table, positions) or _gathered(before, table, positions)
        return self._rows[key]

    def _unflattened(self, table: ir.Value, positions: ir.Value) -> ir.Value | None:
        """Return the 3-D rows from which the table was reshaped, if gathering them gives the same result."""
        value: ir.Value | None = table
        for _ in range(_STEPS):
            node = value.producer() if value is not None else None
            if node is None or node.op_type not in ("Concat", "Reshape") or node.domain:
                return None
            value = node.inputs[0]
            if value is not None and value.shape is not None and len(value.shape) == 3:
                return value if self._same(value, table, positions) else None
        return None

    def _same(self, rows: ir.Value, table: ir.Value, positions: ir.Value) -> bool:
        whole, index, found = (self._evaluate(value) for value in (table, positions, rows))
        return index.max() < len(whole) and np.array_equal(whole[index], found)

    def _evaluate(self, value: ir.Value) -> Array:
        probe = Probe(self._graph, value)
        past, new = sample_lengths(self._graph)
        positions = np.arange(past, past + new)[None] + np.arange(_BATCH)[:, None]
        feed: dict[str, Array] = {
            ATTENTION_MASK: np.ones((_BATCH, past + new), np.int64),
            INPUT_IDS: positions,
            POSITION_IDS: positions,
        }
        for needed in probe.inputs:
            sizes = (_BATCH, static_size(needed, 1) or 1, past, static_size(needed, 3) or 1)
            feed.setdefault(str(needed.name), np.zeros(sizes, np.float32))
        return probe(feed)


def _gathered(before: ir.Node, table: ir.Value, positions: ir.Value) -> ir.Value:
    rows = insert(before, "Gather", [table, positions]).outputs[0]
    rows.shape, rows.type = ir.Shape(["batch", "sequence", static_size(table, 1)]), table.type
    return rows
