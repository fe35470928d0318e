"""Runs of towers whose patches lie in rows: the members of a group one behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import GROUP_ROWS, GROUPS, MERGED_PATCHES, WINDOW_ROWS, WINDOWS
from ...errors import ProviderRuntimeError
from ...graph_opt.lower.paged_kv import BEGINS, KEYS, TABLE, VALUES, rows_input, text_rows

Feeds = Mapping[str, npt.NDArray[Any]]

_NAMES = {GROUPS: GROUP_ROWS, WINDOWS: WINDOW_ROWS}


class TowerRows:
    """Turns the inputs of ``vision.onnx`` into those of a graph of ``PatchRowsPass``.

    Args:
        session: of that graph.
    """

    def __init__(self, session: Any) -> None:
        shapes = {value.name: value.shape for value in session.get_inputs()}
        self._names = [name for name in _NAMES if rows_input(name, BEGINS) in shapes]
        self._caches = {name: shape[1:] for name, shape in shapes.items() if name.startswith((KEYS, VALUES))}
        self._kept = frozenset(shapes)

    @property
    def needed(self) -> bool:
        """Whether the graph is one of that pass."""
        return bool(self._names)

    def feeds(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a run.

        Raises:
            ProviderRuntimeError: a group is not made of whole windows.
        """
        members = {name: [group[group >= 0] for group in feeds[name]] for name in self._names}
        # Windows are parts of groups, and the patches of a group are in order of its windows.
        order = np.concatenate(members[self._names[-1]])
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        if any(np.ptp(places[group]) >= len(group) for groups in members.values() for group in groups):
            raise ProviderRuntimeError("the patches of a group do not lie one behind the other")
        moved = (np.diff(order) != 1).any()
        block = next(iter(self._caches.values()))[1]
        made, blocks = dict[str, npt.NDArray[Any]](), 0
        for name, groups in members.items():
            rows = text_rows([len(group) for group in groups], block)
            blocks = max(blocks, int(rows[TABLE].max()) + 1)
            made |= {rows_input(name, each): array for each, array in rows.items()}
        for name, array in feeds.items():
            if name == MERGED_PATCHES:
                made[name] = places[array]
            elif name in self._kept:
                made[name] = array[order] if moved else array
        return made | {name: np.empty((blocks, *shape), np.uint8) for name, shape in self._caches.items()}
