"""The table of KV slots, and the operations on slots that the runner must carry out."""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from ....providers.kv_groups import Held, KVGroups, resume_point
from ....records import dataclass
from ..requests.chunk import CHUNK_TOKENS, Save


@dataclass(frozen=True, slots=True)
class Release:
    """Free the memory of a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy KV of positions [0, length) from one slot to another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Free KV behind sliding windows: no token before position ``length`` will be computed in the slot."""

    slot: int
    length: int


Operation = Release | Copy | Save | Trim


@dataclass(frozen=True, slots=True)
class Trimming:
    """How KV behind sliding windows is freed, and how much memory that saves.

    Args:
        step: number of tokens freed at a time.
        groups: the groups of layers.
        slack: number of newest tokens whose windows stay complete, for sequences that branch there.
    """

    step: int
    groups: KVGroups
    slack: int = 0

    def shortest(self, computed: int) -> int:
        """Return the shortest prefix that a slot with ``computed`` tokens can serve after it is trimmed."""
        return max(0, computed - self.slack) // self.step * self.step

    def saved(self, shortest: int) -> int:
        """Return how much KV a slot trimmed to ``shortest`` has freed, in tokens."""
        freed = sum(group.freed(shortest) * group.bytes_per_token for group in self.groups)
        return freed // max(1, sum(group.bytes_per_token for group in self.groups))


class SlotTable:
    """The state of each KV slot; the runner owns the memory.

    A slot is free, used by a running request, or idle: an idle slot keeps the KV of a finished request until
    its memory is needed. The lowest free slot is allocated first, so that decode runs cover few slots.

    Args:
        num_slots: the number of slots.
        max_tokens: maximum tokens of all slots together; None if only the slots limit it.
        trimming: how KV behind sliding windows is freed; None if it cannot be.
        groups: the groups of layers, which decide at which lengths a prefix can be resumed.
        state_tokens: the size of a state in tokens of KV; 0 if no layer has one.
        fixed_tokens: the size in tokens of KV of what a slot has beside its tokens; see ``EncoderKV``.

    Attributes:
        held: used slot -> tokens that it holds, or will hold after the planned steps.
        operations: the queued operations, in order.
        used_tokens: KV held by used slots, in tokens.
        idle_tokens: KV held by idle slots, in tokens.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int | None = None,
        trimming: Trimming | None = None,
        groups: KVGroups = (),
        state_tokens: int = 0,
        fixed_tokens: int = 0,
    ) -> None:
        self.fixed_tokens = fixed_tokens
        self.num_slots = num_slots
        self.state_tokens = state_tokens
        self._groups = groups
        self._checkpoints: dict[int, tuple[int, ...]] = {}  # by slot, lengths at which a state is kept
        self.max_tokens = max_tokens
        self._trimming = trimming
        self._shortest: dict[int, int] = {}  # trimmed slot -> the shortest prefix that it serves
        self.used_tokens = 0
        self.idle_tokens = 0
        self.held: dict[int, int] = {}
        self._idle: dict[int, int] = {}  # the same of idle slots, least recently used first
        self._idle_since: dict[int, float] = {}  # of idle slots, and of others when they last were
        self._pins: dict[int, float] = {}  # idle slots that are evicted last, until this ``time.monotonic``
        self._free = list(range(num_slots))  # a heap
        self.operations: list[Operation] = []

    @property
    def num_used(self) -> int:
        """The number of used slots."""
        return len(self.held)

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def idle(self) -> tuple[int, ...]:
        """The idle slots, least recently used first."""
        return tuple(self._idle)

    @property
    def shortest(self) -> Mapping[int, int]:
        """The shortest prefix that each trimmed slot can serve, by slot."""
        return self._shortest

    def checkpoints(self, slot: int) -> tuple[int, ...]:
        """Return the lengths at which a slot keeps, or will keep, a state besides the newest one."""
        return self._checkpoints.get(slot, ())

    def keep(self, slot: int, lengths: Sequence[int]) -> None:
        """Keep states of a used slot at these lengths, as many of the last ones as the budget allows."""
        self.used_tokens -= self.worth(slot)
        self._checkpoints.pop(slot, None)
        self.used_tokens += self.worth(slot)
        fitting = [n for n in range(len(lengths) + 1) if self.fits(n * self.state_tokens)][-1]
        kept = sorted(lengths)[len(lengths) - fitting :]
        if kept:
            self._checkpoints[slot] = tuple(kept)
            self.used_tokens += len(kept) * self.state_tokens

    def drop_state(self, slots: Iterable[int]) -> bool:
        """Drop the shortest checkpoint of the first slot that has any; return whether one has."""
        for slot in slots:
            if not (lengths := self.checkpoints(slot)):
                continue
            self._checkpoints[slot] = lengths[1:]
            if slot in self.held:
                self.used_tokens -= self.state_tokens
            else:
                self.idle_tokens -= self.state_tokens
            return True
        return False

    def resume_point(self, slot: int, length: int, computed: int) -> int:
        """Return the longest prefix of at most ``length`` tokens that a slot can serve, 0 if it has none.

        Args:
            slot: a slot that is not free.
            length: the number of first tokens that a sequence has in common with the slot's.
            computed: the number of the slot's tokens that are computed.
        """
        if not self.state_tokens:  # the same in fewer steps, since every match asks for every slot
            return min(length, computed) if length >= self._shortest.get(slot, 0) else 0
        held = Held(computed, self._shortest.get(slot, 0), self.checkpoints(slot))
        return resume_point(self._groups, length, held)

    def oldest_idle(self, spared: Collection[int] = ()) -> int | None:
        """Return the least recently used idle slot that is not ``spared``, None if there is none.

        A slot that is pinned goes after all others.
        """
        idle = [slot for slot in self._idle if slot not in spared] if spared else list(self._idle)
        if self._pins:
            now = time.monotonic()
            self._pins = {slot: until for slot, until in self._pins.items() if until > now}
            idle.sort(key=self._pins.__contains__)
        return idle[0] if idle else None

    def fits(self, num_tokens: int) -> bool:
        """Whether the budget allows ``num_tokens`` more."""
        return self.max_tokens is None or self.used_tokens + self.idle_tokens + num_tokens <= self.max_tokens

    def allocate(self, num_tokens: int) -> int:
        """Use the lowest free slot for ``num_tokens`` tokens; return it."""
        slot = heapq.heappop(self._free)
        self._use(slot, num_tokens)
        return slot

    def grow(self, slot: int, num_tokens: int) -> None:
        """Set the number of tokens of a used slot."""
        self.used_tokens += num_tokens - self.held[slot]
        self.held[slot] = num_tokens

    def free(self, slot: int) -> None:
        """Free a used slot."""
        self.used_tokens -= self.worth(slot)
        del self.held[slot]
        self._give_back(slot)

    def park(self, slot: int, num_tokens: int, pin_seconds: float = 0.0) -> None:
        """Make a used slot idle; it keeps ``num_tokens`` tokens, and is evicted last for ``pin_seconds``."""
        if pin_seconds:
            self._pins[slot] = time.monotonic() + pin_seconds
        self.used_tokens -= self.worth(slot)
        del self.held[slot]
        self._idle[slot] = num_tokens
        self._idle_since[slot] = time.monotonic()
        self.idle_tokens += self.worth(slot)

    def touch(self, slot: int) -> None:
        """Mark an idle slot as the most recently used."""
        self._idle[slot] = self._idle.pop(slot)
        self._idle_since[slot] = time.monotonic()

    def idle_since(self, slot: int) -> float:
        """Return when an idle slot was last used, in seconds of ``time.monotonic``."""
        return self._idle_since[slot]

    def take_over(self, slot: int, num_tokens: int) -> None:
        """Use an idle slot with its KV for ``num_tokens`` tokens."""
        self.idle_tokens -= self.worth(slot)
        del self._idle[slot]
        self._pins.pop(slot, None)
        self._use(slot, num_tokens)

    def evict(self, slot: int) -> None:
        """Free an idle slot."""
        self.idle_tokens -= self.worth(slot)
        del self._idle[slot]
        self._pins.pop(slot, None)
        self._give_back(slot)

    def trimmable(self, slot: int, computed: int) -> int:
        """Return how much KV trimming a used slot with ``computed`` tokens would free, in tokens."""
        if self._trimming is None:
            return 0
        return max(0, self._trimming.saved(self._trimming.shortest(computed)) - self._saved(slot))

    def trim(self, slot: int, computed: int) -> None:
        """Queue freeing of the KV behind the windows of a used slot, if that frees any."""
        if gain := self.trimmable(slot, computed):
            assert self._trimming is not None  # noqa: S101 -- otherwise the gain is 0
            self._shortest[slot] = self._trimming.shortest(computed)
            self.used_tokens -= gain
            if self.state_tokens:
                self.keep(slot, [n for n in self.checkpoints(slot) if n >= self._shortest[slot]])
            self.operations.append(Trim(slot, self._shortest[slot]))

    def fork(self, source: int, target: int, length: int) -> None:
        """Queue the copy of a prefix into a used slot.

        It inherits the shortest prefix of its source, and the checkpoints before ``length``.
        """
        self.operations.append(Copy(source, target, length))
        if self.state_tokens:
            self.keep(target, [n for n in self.checkpoints(source) if n < length])
        if source in self._shortest:
            self._shortest[target] = self._shortest[source]
            self.used_tokens -= self._saved(target)

    def save(self, slot: int, keys: Sequence[bytes], *, leaves: bool = True) -> None:
        """Queue saving of the slot's chunks and states to the tiers.

        Args:
            slot: a used or idle slot.
            keys: of its chunks.
            leaves: whether it is released or trimmed then; otherwise they are for other processes.
        """
        most = len(keys) * CHUNK_TOKENS
        states = tuple(n for n in self.checkpoints(slot) if n <= most and not n % CHUNK_TOKENS)
        self.operations.append(Save(slot, tuple(keys), self._shortest.get(slot, 0), states, leaves))

    def take_operations(self) -> list[Operation]:
        """Remove and return the queued operations, in order."""
        operations, self.operations = self.operations, []
        return operations

    def tokens(self, slot: int) -> int:
        """Return how many tokens a used or idle slot holds."""
        return self.held[slot] if slot in self.held else self._idle[slot]

    def worth(self, slot: int) -> int:
        """Return the KV and states that a used or idle slot holds, in tokens.

        That is less than ``tokens`` if it was trimmed, and more with states or an encoder's rows.
        """
        states = self.state_tokens and self.state_tokens * (1 + len(self.checkpoints(slot)))
        return self.tokens(slot) - self._saved(slot) + states + self.fixed_tokens

    def is_free(self, slot: int) -> bool:
        """Whether a slot is free."""
        return slot not in self.held and slot not in self._idle

    def is_idle(self, slot: int) -> bool:
        """Whether a slot is idle."""
        return slot in self._idle

    def check_integrity(self) -> None:
        """Check that each slot has exactly one state and that the counters are right.

        Raises:
            RuntimeError: they are not; the message has the numbers.
        """
        if sorted([*self._free, *self.held, *self._idle]) != list(range(self.num_slots)):
            raise RuntimeError(
                f"free {sorted(self._free)}, used {sorted(self.held)} and idle {sorted(self._idle)} "
                f"do not contain each of {self.num_slots} slots once"
            )
        counted = self.used_tokens, self.idle_tokens
        held = [sum(self.worth(slot) for slot in slots) for slots in (self.held, self._idle)]
        if counted != tuple(held):
            raise RuntimeError(f"the counters say {counted} used and idle tokens, the slots hold {held}")
        marks = self._shortest.keys() | self._checkpoints.keys()
        if marks & set(self._free):
            raise RuntimeError(f"free slots are marked as trimmed, or with states: {sorted(marks)}")
        if not self.fits(0):
            raise RuntimeError(f"the slots hold {sum(held)} tokens, the budget is {self.max_tokens}")

    def _use(self, slot: int, num_tokens: int) -> None:
        self.held[slot] = num_tokens
        self.used_tokens += self.worth(slot)

    def _saved(self, slot: int) -> int:
        """Return the KV that trimming a slot has freed, in tokens."""
        return self._trimming.saved(self._shortest.get(slot, 0)) if self._trimming is not None else 0

    def _give_back(self, slot: int) -> None:
        self._shortest.pop(slot, None)
        self._checkpoints.pop(slot, None)
        heapq.heappush(self._free, slot)
        self.operations.append(Release(slot))
