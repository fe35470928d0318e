"""Which slot holds how much KV, and what the runner must do about it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Release:
    """A slot whose memory can be given back."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """KV of positions [0, length) to copy from one slot to another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Save:
    """A slot whose chunks of KV, so named, are worth keeping elsewhere; those before ``start`` are gone."""

    slot: int
    keys: tuple[bytes, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Trim:
    """KV behind sliding windows to give back: no token before ``length`` will be computed there."""

    slot: int
    length: int


Operation = Release | Copy | Save | Trim


@dataclass(frozen=True, slots=True)
class Windows:
    """What giving back KV behind sliding windows is worth.

    Args:
        step: tokens that are given back at a time.
        widest: positions that a token looks back at, itself included.
        share: how much of a token's KV lies in layers with windows, out of all.
        slack: tokens behind the newest that stay as they are, for sequences that part there.
    """

    step: int
    widest: int
    share: Fraction
    slack: int = 0

    def shortest(self, computed: int) -> int:
        """The shortest prefix that a slot of so many tokens serves once it is trimmed."""
        return max(0, computed - self.slack) // self.step * self.step

    def saved(self, shortest: int) -> int:
        """What a slot that serves none but longer prefixes has given back, in tokens' worth of KV."""
        behind = max(0, shortest + 1 - self.widest) // self.step * self.step
        return int(behind * self.share)


class SlotTable:
    """Bookkeeping of KV slots; the memory itself belongs to the runner.

    A slot is free, used by a running request, or idle: it keeps what a request left behind until its memory
    is needed. The lowest free slot is given out first, so that decode runs cover few slots.

    Args:
        num_slots: sequences that may hold KV at once.
        max_tokens: most tokens that all slots together may hold; None is no limit beyond the slots' own.
        windows: what of a slot's KV can be given back; None is nothing.

    Attributes:
        used_tokens: what slots in use hold, in tokens' worth of KV.
        idle_tokens: what idle ones hold.
    """

    def __init__(self, num_slots: int, max_tokens: int | None = None, windows: Windows | None = None) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self._windows = windows
        self._shortest: dict[int, int] = {}  # trimmed slot -> the shortest prefix that it serves
        self.used_tokens = 0
        self.idle_tokens = 0
        self._tokens: dict[int, int] = {}  # slot in use -> tokens it holds or will hold after this step
        self._idle: dict[int, int] = {}  # the same of idle slots, least recently used first
        self._free = list(range(num_slots))  # a heap
        self._operations: list[Operation] = []
        self._given_back: dict[int, int] = {}  # slots released since then -> tokens they held

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return len(self._tokens)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def idle(self) -> tuple[int, ...]:
        """Idle slots, least recently used first."""
        return tuple(self._idle)

    @property
    def shortest(self) -> Mapping[int, int]:
        """Of trimmed slots, the shortest prefix that each can still serve."""
        return self._shortest

    def oldest_idle(self, spared: Collection[int] = ()) -> int | None:
        """The least recently used idle slot that is not ``spared``."""
        return next((slot for slot in self._idle if slot not in spared), None)

    def fits(self, num_tokens: int) -> bool:
        """Whether the budget has room for ``num_tokens`` more."""
        return self.max_tokens is None or self.used_tokens + self.idle_tokens + num_tokens <= self.max_tokens

    def allocate(self, num_tokens: int) -> int:
        """Take the lowest free slot for ``num_tokens`` tokens."""
        slot = heapq.heappop(self._free)
        self._use(slot, num_tokens)
        return slot

    def grow(self, slot: int, num_tokens: int) -> None:
        """Let a slot in use hold ``num_tokens`` in all."""
        self.used_tokens += num_tokens - self._tokens[slot]
        self._tokens[slot] = num_tokens

    def free(self, slot: int) -> None:
        """Give back a slot in use."""
        self.used_tokens -= self.worth(slot)
        self._give_back(slot, self._tokens.pop(slot))

    def park(self, slot: int, num_tokens: int) -> None:
        """Make a slot in use idle; it keeps ``num_tokens``."""
        self.used_tokens -= self.worth(slot)
        del self._tokens[slot]
        self._idle[slot] = num_tokens
        self.idle_tokens += self.worth(slot)

    def touch(self, slot: int) -> None:
        """Note that an idle slot's content was of use."""
        self._idle[slot] = self._idle.pop(slot)

    def take_over(self, slot: int, num_tokens: int) -> None:
        """Use an idle slot, with its content, for ``num_tokens`` tokens."""
        self.idle_tokens -= self.worth(slot)
        del self._idle[slot]
        self._use(slot, num_tokens)

    def evict(self, slot: int) -> None:
        """Give back an idle slot."""
        self.idle_tokens -= self.worth(slot)
        self._give_back(slot, self._idle.pop(slot))

    def trimmable(self, slot: int, computed: int) -> int:
        """Tokens' worth of KV that a slot in use would give back, ``computed`` of whose tokens have KV."""
        if self._windows is None:
            return 0
        return max(0, self._windows.saved(self._windows.shortest(computed)) - self._saved(slot))

    def trim(self, slot: int, computed: int) -> None:
        """Let the runner give back KV that the slot's next tokens do not look at."""
        if gain := self.trimmable(slot, computed):
            assert self._windows is not None  # noqa: S101 -- or there were no gain
            self._shortest[slot] = self._windows.shortest(computed)
            self.used_tokens -= gain
            self._operations.append(Trim(slot, self._shortest[slot]))

    def fork(self, source: int, target: int, length: int) -> None:
        """Let the runner copy a prefix into a slot in use, which serves no shorter ones than its source."""
        self.copy(source, target, length)
        if source in self._shortest:
            self._shortest[target] = self._shortest[source]
            self.used_tokens -= self._saved(target)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the runner copy a prefix.

        A target that was just given back keeps its memory for that: pages touched anew cost several times
        what copying into them does.
        """
        release = Release(target)
        if release in self._operations and 2 * length >= self._given_back[target]:
            self._operations.remove(release)
        self._operations.append(Copy(source, target, length))

    def save(self, slot: int, keys: Sequence[bytes]) -> None:
        """Let the slot's chunks be kept elsewhere before it is released or trimmed."""
        self._operations.append(Save(slot, tuple(keys), self._shortest.get(slot, 0)))

    def take_operations(self) -> list[Operation]:
        """What the runner has to do since the last call, in this order."""
        operations, self._operations = self._operations, []
        self._given_back.clear()
        return operations

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges [first, last] of slots not in use between some that are."""
        used = sorted(self._tokens)
        return [(low + 1, high - 1) for low, high in pairwise(used) if high - low > 1]

    def lowest_free(self) -> int:
        """The free slot given out next."""
        return self._free[0]

    def highest(self) -> int:
        """The highest slot in use."""
        return max(self._tokens)

    def move(self, source: int, target: int) -> None:
        """Move a slot's content, used or idle, into a free slot."""
        self._free.remove(target)
        heapq.heapify(self._free)
        # Rebuilt, since the order of idle slots tells when they were last used.
        self._tokens = {target if slot == source else slot: n for slot, n in self._tokens.items()}
        self._idle = {target if slot == source else slot: n for slot, n in self._idle.items()}
        if source in self._shortest:
            self._shortest[target] = self._shortest.pop(source)
        self._give_back(source, self.tokens(target))

    def tokens(self, slot: int) -> int:
        """How many tokens a used or idle slot holds."""
        return self._tokens[slot] if slot in self._tokens else self._idle[slot]

    def worth(self, slot: int) -> int:
        """What a used or idle slot holds, in tokens' worth of KV."""
        return self.tokens(slot) - self._saved(slot)

    def is_free(self, slot: int) -> bool:
        """Whether a slot holds nothing."""
        return slot not in self._tokens and slot not in self._idle

    def is_idle(self, slot: int) -> bool:
        """Whether a slot is idle."""
        return slot in self._idle

    def check_integrity(self) -> None:
        """Check that no slot is lost, held twice or counted wrongly.

        Raises:
            RuntimeError: one is; the message has the numbers.
        """
        if sorted([*self._free, *self._tokens, *self._idle]) != list(range(self.num_slots)):
            raise RuntimeError(
                f"free {sorted(self._free)}, used {sorted(self._tokens)} and idle {sorted(self._idle)} "
                "are not all slots once"
            )
        counted = self.used_tokens, self.idle_tokens
        held = [sum(self.worth(slot) for slot in slots) for slots in (self._tokens, self._idle)]
        if counted != tuple(held):
            raise RuntimeError(f"{counted} used and idle tokens counted, {held} held")
        if self._shortest.keys() & set(self._free):
            raise RuntimeError(f"free slots among the trimmed ones, {self._shortest}")
        if not self.fits(0):
            raise RuntimeError(f"{sum(held)} tokens held, more than the budget of {self.max_tokens}")

    def _use(self, slot: int, num_tokens: int) -> None:
        self._tokens[slot] = num_tokens
        self.used_tokens += self.worth(slot)

    def _saved(self, slot: int) -> int:
        """What a slot has given back, in tokens' worth of KV."""
        return self._windows.saved(self._shortest.get(slot, 0)) if self._windows is not None else 0

    def _give_back(self, slot: int, num_tokens: int) -> None:
        self._shortest.pop(slot, None)
        self._given_back[slot] = num_tokens
        heapq.heappush(self._free, slot)
        self._operations.append(Release(slot))
