"""Which slots of a runner over several processes hold KV, and which of them lost it."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ProviderRuntimeError


class FilledSlots:
    """The slots that hold KV in every process of a runner.

    Args:
        part: what a process is, for messages: "a rank".
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._filled = set[int]()
        self._lost = set[int]()

    def __contains__(self, slot: int) -> bool:
        return slot in self._filled

    def add(self, *slots: int) -> None:
        """Record that slots hold KV."""
        self._filled.update(slots)

    def discard(self, slot: int) -> None:
        """Record that a slot was freed."""
        self._filled.discard(slot)

    def check(self, slots: Iterable[int]) -> None:
        """Check that slots hold KV.

        Raises:
            ProviderRuntimeError: one does not.
        """
        missing = sorted(set(slots) - self._filled)
        if missing:
            raise ProviderRuntimeError(
                f"the KV of slot {missing[0]} was lost when {self._part} of the model ended; run the "
                "sequence again"
            )

    def lose(self) -> set[int]:
        """Record that a process ended, and with it the KV of all slots; return these."""
        lost, self._filled = self._filled, set()
        self._lost |= lost
        return lost

    def take_lost(self) -> set[int]:
        """Return the slots that lost their KV since the last call."""
        lost, self._lost = self._lost, set()
        return lost
