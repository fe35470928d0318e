"""Which slot holds whose KV, and how much of it."""

from __future__ import annotations

import heapq


class SlotTable:
    """Bookkeeping of KV slots; the memory itself belongs to the runner.

    The lowest free slot is given out first, since a decode run covers all slots up to the highest one in use.

    Args:
        num_slots: sequences that may hold KV at once.
        max_tokens: most tokens that all slots together may hold; None is no limit beyond the slots' own.
    """

    def __init__(self, num_slots: int, max_tokens: int | None = None) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.used_tokens = 0
        self._tokens: dict[int, int] = {}  # slot in use -> tokens it holds or will hold after this step
        self._free = list(range(num_slots))  # a heap
        self._freed: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return len(self._tokens)

    @property
    def highest(self) -> int:
        """The highest slot in use, -1 if there is none."""
        return max(self._tokens, default=-1)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a slot is free and ``num_tokens`` more fit into the budget."""
        return bool(self._free) and self._fits(num_tokens)

    def allocate(self, num_tokens: int) -> int:
        """Take the lowest free slot for ``num_tokens`` tokens."""
        slot = heapq.heappop(self._free)
        self._tokens[slot] = num_tokens
        self.used_tokens += num_tokens
        self._freed.discard(slot)
        return slot

    def can_grow(self, slot: int, num_tokens: int) -> bool:
        """Whether the slot may hold ``num_tokens`` in all."""
        return self._fits(num_tokens - self._tokens[slot])

    def grow(self, slot: int, num_tokens: int) -> None:
        """Let the slot hold ``num_tokens`` in all."""
        self.used_tokens += num_tokens - self._tokens[slot]
        self._tokens[slot] = num_tokens

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.used_tokens -= self._tokens.pop(slot)
        heapq.heappush(self._free, slot)
        self._freed.add(slot)

    def take_freed(self) -> list[int]:
        """Slots given back since the last call and not in use again: their memory can be released."""
        freed = sorted(self._freed)
        self._freed.clear()
        return freed

    def lowest_hole(self) -> int | None:
        """The lowest free slot below the highest used one."""
        return self._free[0] if self._free and self._free[0] < self.highest else None

    def move_highest(self) -> tuple[int, int]:
        """Move the bookkeeping of the highest slot into the lowest hole; return (from, to)."""
        source = self.highest
        target = self.allocate(self._tokens[source])
        self.free(source)
        return source, target

    def tokens(self, slot: int) -> int:
        """How many tokens a slot in use holds."""
        return self._tokens[slot]

    def check_integrity(self) -> None:
        """Check that no slot is lost, held twice or counted wrongly.

        Raises:
            RuntimeError: one is; the message has the numbers.
        """
        if sorted([*self._free, *self._tokens]) != list(range(self.num_slots)):
            raise RuntimeError(
                f"free {sorted(self._free)} and used {sorted(self._tokens)} are not all slots once"
            )
        if self.used_tokens != sum(self._tokens.values()):
            raise RuntimeError(f"{self.used_tokens} tokens counted, {sum(self._tokens.values())} held")
        if self.max_tokens is not None and self.used_tokens > self.max_tokens:
            raise RuntimeError(f"{self.used_tokens} tokens held, more than the budget of {self.max_tokens}")

    def _fits(self, num_tokens: int) -> bool:
        return self.max_tokens is None or self.used_tokens + num_tokens <= self.max_tokens
