"""The IO bindings of a slot runner's runs, which are kept and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .slot_memory import SlotBinding, SlotMemory
from .slot_policy import SlotPolicy

DECODE = "decode"
_MAX_BINDINGS = 128

RunKey = tuple[str, int, int]  # kind of the run, first slot, number of slots


class SlotBindings:
    """Up to 128 bindings by run, and those of captured runs always: another would be captured again.

    Args:
        memory: the caches.
        policy: which runs are captured.
    """

    def __init__(self, memory: SlotMemory, policy: SlotPolicy) -> None:
        self.runs: dict[RunKey, SlotBinding] = {}
        self._memory, self._policy = memory, policy

    def caches(self, kind: str, first: int, count: int, session: Any) -> SlotBinding:
        """Return a binding with the caches of slots [first, first + count)."""
        key = (kind, first, count)
        if key not in self.runs:
            self._make_room()
            binding = session.io_binding()
            self._memory.bind_caches(binding, first, count)
            self.runs[key] = SlotBinding(binding)
        return self.runs[key]

    def decode(
        self, first: int, count: int, session: Any, bind: Callable[[SlotBinding], SlotBinding]
    ) -> SlotBinding:
        """Return the binding of a decode run; ``bind`` completes a new one, which has the caches."""
        key = (DECODE, first, count)
        if key not in self.runs:
            self.runs[key] = bind(self.caches(*key, session))
        return self.runs[key]

    def clear(self) -> None:
        """Forget all bindings."""
        self.runs.clear()

    def _make_room(self) -> None:
        if len(self.runs) >= _MAX_BINDINGS:
            free = [key for key in self.runs if not self._is_captured(*key)]
            self.runs.pop((free or list(self.runs))[0])

    def _is_captured(self, kind: str, first: int, count: int) -> bool:
        return kind == DECODE and self._policy.captures(first, count)
