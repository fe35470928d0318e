"""The inputs for LoRA adapters of a slot runner's runs.

On the host, a run binds only the rows of the adapters that it uses. On a device all rows are bound, since
the memory of a device cannot be sliced on every target, and a captured run has fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import LORA_MASK
from ..base import LoraMatrices, Row, RunnerConfig
from ..lora import LoraPlaces, Span
from .slot_memory import SlotBinding, SlotMemory, shared_value

_MAX_SPANS = 32


class SlotLora:
    """Adapters of a slot runner.

    Args:
        modules: number of inputs and outputs of each linear layer, by module.
        config: options of the runner.
        memory: the runner's memory.
    """

    def __init__(
        self, modules: Mapping[str, tuple[int, int]], config: RunnerConfig, memory: SlotMemory
    ) -> None:
        self._places = LoraPlaces(modules, config.max_loras, config.max_lora_rank, sliced=memory.slices)
        self._memory = memory
        self._version = 0
        self._values: dict[Span, dict[str, Any]] = {}
        self._masks: dict[Span, npt.NDArray[np.bool_]] = {}  # [slots, 1, rows of the span]

    def write(self, place: int, matrices: LoraMatrices) -> None:
        """Replace the adapter of a place; see ``LoraPlaces.write``."""
        self._places.write(place, matrices)
        self._version += 1
        for span, values in self._values.items():
            for name, array in self._places.feeds(span).items():
                self._memory.refresh(values[name], array)

    def decode(self, run: SlotBinding, rows: Sequence[Row], first: int, count: int) -> None:
        """Bind the adapters of decode rows to a run over slots [first, first + count)."""
        used: list[int | None] = [None] * count
        for row in rows:
            used[row.slot - first] = row.lora
        span = self._places.span(used)
        mask = self._mask(span)[first : first + count]
        self._places.fill(mask, used, span)
        if self._bind(run, span) and self._memory.slices:
            run.binding.bind_ortvalue_input(LORA_MASK, shared_value(mask))

    def step_feeds(self, part: slice) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs that ``SlotMemory.bind_step`` copies to a device before each run."""
        return {} if self._memory.slices else {LORA_MASK: self._mask(self._places.whole)[part]}

    def prompt(self, run: SlotBinding, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """Bind the adapters of prompt rows to a run; return the other inputs."""
        used = [row.lora for row in rows]
        span = self._places.span(used)
        self._bind(run, span)
        return {LORA_MASK: self._places.mask(used, span)}

    def _mask(self, span: Span) -> npt.NDArray[np.bool_]:
        if span not in self._masks:
            self._masks[span] = np.zeros((self._memory.slots, 1, span[1] - span[0]), np.bool_)
        return self._masks[span]

    def _bind(self, run: SlotBinding, span: Span) -> bool:
        """Bind the matrices unless the run has them; return whether it was necessary."""
        state = (*span, self._version)
        if run.lora == state:
            return False
        if span not in self._values:
            if len(self._values) >= _MAX_SPANS:
                self._values.pop(next(iter(self._values)))
            self._values[span] = {
                name: self._memory.hold(name, array) for name, array in self._places.feeds(span).items()
            }
        for name, value in self._values[span].items():
            run.binding.bind_ortvalue_input(name, value)
        run.lora = state
        return True
