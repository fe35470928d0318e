"""The matrices of the resident LoRA adapters, and the inputs of a run for the adapters of its rows.

Each adapter has a place of ``rank`` rows in the matrices of every module; rows beyond its own rank are zero:

    down [places * rank, in]    place 0 | place 1 | ...
    up   [places * rank, out]

A run binds only the rows between the first and the last place that it uses; see
``graph_opt/lower/pipelines/lora.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..contract import LORA_MASK, lora_down_name, lora_module, lora_up_name
from ..errors import ProviderRuntimeError
from ..records import dataclass
from .base import LoraMatrices, RunnerConfig

Span = tuple[int, int]  # the first bound row, and the row after the last
_UNUSED: Span = (0, 1)  # a graph must have at least one row; no row of the batch reads it


@dataclass(frozen=True, slots=True)
class LoraInputs:
    """The inputs of a run.

    Args:
        mask: ``lora_mask``.
        matrices: the other inputs, as views.
        state: equal for two runs if their matrices are.
    """

    mask: npt.NDArray[np.bool_]
    matrices: Mapping[str, npt.NDArray[np.float32]]
    state: tuple[int, int, int]

    @property
    def feeds(self) -> dict[str, npt.NDArray[Any]]:
        """All inputs by name."""
        return {LORA_MASK: self.mask, **self.matrices}


class LoraPlaces:
    """Matrices of adapters in host memory.

    Args:
        modules: number of inputs and outputs of each linear layer, by module.
        places: maximum number of resident adapters.
        rank: maximum rank of an adapter.
        sliced: whether runs bind only the rows that they use; captured runs have fixed shapes.
    """

    def __init__(
        self, modules: Mapping[str, tuple[int, int]], places: int, rank: int, *, sliced: bool = True
    ) -> None:
        self.modules, self.rank, self._sliced = modules, rank, sliced
        self.arrays: dict[str, npt.NDArray[np.float32]] = {}
        for module, (inputs, outputs) in modules.items():
            self.arrays[lora_down_name(module)] = np.zeros((places * rank, inputs), np.float32)
            self.arrays[lora_up_name(module)] = np.zeros((places * rank, outputs), np.float32)
        self._ranks = [0] * places
        self._version = 0

    @property
    def whole(self) -> Span:
        """All rows."""
        return 0, len(self._ranks) * self.rank

    def write(self, place: int, matrices: LoraMatrices) -> None:
        """Replace the adapter of a place; modules without matrices are not changed by it.

        Raises:
            ProviderRuntimeError: there is no such place, module or room for the rank.
        """
        if not 0 <= place < len(self._ranks):
            raise ProviderRuntimeError(
                f"there is no place {place} for an adapter, only {len(self._ranks)} (max_loras)"
            )
        for module, (down, up) in matrices.items():
            fitting = module in self.modules and (down.shape[1], up.shape[1]) == self.modules[module]
            if not fitting or not len(down) == len(up) <= self.rank:
                raise ProviderRuntimeError(
                    f"matrices {list(down.shape)} and {list(up.shape)} do not fit module '{module}' and "
                    f"rank {self.rank}"
                )
        self._version += 1
        first = place * self.rank
        for module in self.modules:
            pair = matrices.get(module, ())
            names = lora_down_name(module), lora_up_name(module)
            for index, name in enumerate(names):
                rows = self.arrays[name][first : first + self.rank]
                rows[...] = 0
                if pair:
                    rows[: len(pair[index])] = pair[index]
        self._ranks[place] = max((len(down) for down, _ in matrices.values()), default=0)

    def span(self, used: Iterable[int | None]) -> Span:
        """Return the rows that a run binds for these places; None is a row of the batch without adapter."""
        if not self._sliced:
            return self.whole
        places = [place for place in used if place is not None and self._ranks[place]]
        if not places:
            return _UNUSED
        last = max(places)
        return min(places) * self.rank, last * self.rank + self._ranks[last]

    def mask(self, used: Sequence[int | None], span: Span) -> npt.NDArray[np.bool_]:
        """Return ``lora_mask`` [len(used), 1, rows of the span]."""
        found = np.zeros((len(used), 1, span[1] - span[0]), np.bool_)
        self.fill(found, used, span)
        return found

    def fill(self, mask: npt.NDArray[np.bool_], used: Sequence[int | None], span: Span) -> None:
        """Write ``lora_mask`` into ``mask``; see ``mask``."""
        mask[...] = False
        for row, place in enumerate(used):
            if place is not None:
                first = place * self.rank - span[0]
                mask[row, 0, first : first + self._ranks[place]] = True

    def inputs(self, used: Sequence[int | None]) -> LoraInputs:
        """Return the inputs of a run over rows of the batch with these places."""
        span = self.span(used)
        return LoraInputs(self.mask(used, span), self.feeds(span), (*span, self._version))

    def feeds(self, span: Span) -> dict[str, npt.NDArray[np.float32]]:
        """Return the matrices' rows of a span by input name, as views."""
        return {name: array[slice(*span)] for name, array in self.arrays.items()}


def lora_facts(modules: Mapping[str, tuple[int, int]], config: RunnerConfig) -> dict[str, Any]:
    """Return the fields of ``RunnerInfo`` for a graph with branches in these modules."""
    if not modules:
        return {}
    sizes = {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank}
    return {**sizes, "lora_modules": modules}


def lora_modules(shapes: Mapping[str, Sequence[object]]) -> dict[str, tuple[int, int]]:
    """Return the number of inputs and outputs of the modules that adapters can change.

    Args:
        shapes: the shape of each input of a lowered graph, by name.
    """
    modules = {}
    for name, shape in shapes.items():
        module = lora_module(name)
        if module is not None:
            sizes = shape[-1], shapes[lora_up_name(module)][-1]
            modules[module] = (int(str(sizes[0])), int(str(sizes[1])))
    return modules
