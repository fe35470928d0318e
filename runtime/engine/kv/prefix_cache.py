"""The prefix cache: reuse KV of running requests, and of finished ones whose slots are still idle.

An idle slot keeps its KV until the slot or its memory is needed; the least recently used is evicted first. A
new request that continues the text of an idle slot takes the slot over. A request that shares only the first
tokens gets a copy of their KV, which costs microseconds a token.

Slots hold all positions, even those outside of a sliding window, so models with windows share prefixes too.
If memory is short, running requests first free (trim) KV behind their windows. A trimmed slot cannot serve
prefixes shorter than it was when trimmed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ....records import dataclass
from ..requests.chunk import CHUNK_TOKENS, ChunkKeys, TierPrefix
from ..requests.request import Request
from .held_blocks import HeldBlocks
from .prefix_tree import PrefixMatch, PrefixTree
from .slots import SlotTable

# An idle slot is taken over, and its tail lost, if at least this share of its tokens match; otherwise the
# prefix is copied. Computing a token costs about 100 copies, but an answer is seldom needed again: the next
# prompt has it, or another text in its place. A tail of the prompt belongs to a conversation that goes on. So
# it is kept while there is a free slot, and a long answer is not worth another text's slot.
_MIN_TAKE_OVER_SHARE = 0.9
# States that a slot keeps of texts that it continues, besides those of its newest request.
_MOST_CHECKPOINTS = 2
# Tokens that a state must save; it is as large as the KV of hundreds to thousands of tokens.
_MIN_JUNCTION = 16
# The same of a state for the tiers, which another process may never ask for.
_MIN_STORED = 2 * CHUNK_TOKENS
# Minimum number of tokens gained by a restore; a restored chunk may overlap tokens that the slot holds.
_MIN_RESTORED = CHUNK_TOKENS // 2


class StoredPrefixes(Protocol):
    """Chunks of KV in the tiers; implemented by ``tiers.mover.KVMover``."""

    identity: str
    shared: bool  # whether other processes wait for prefixes: they are saved when a request ends

    def available(self, keys: Sequence[bytes]) -> TierPrefix:
        """Return which first tokens can be restored; none if computing them is faster."""


@dataclass(slots=True)
class PrefixCounters:
    """Running totals; see ``EngineStats``."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_cached_tokens: int = 0


class PrefixCache:
    """Assign slots to requests, with the longest prefix whose KV is available.

    Args:
        slots: the table of all slots.
        enabled: False frees every slot when its request ends.
        stored: KV in the tiers; None if there are none.
        trims_always: free KV behind windows at once, not only when memory is short.
        blocks: follows which blocks the slots hold; None if nobody asks.
    """

    def __init__(
        self,
        slots: SlotTable,
        *,
        enabled: bool = True,
        stored: StoredPrefixes | None = None,
        trims_always: bool = False,
        blocks: HeldBlocks | None = None,
    ) -> None:
        self.enabled = enabled
        self.trims_always = trims_always
        self._running: dict[int, Request] = {}  # by slot
        self._stored, self._blocks = stored, blocks
        self._keys: dict[int, list[bytes]] = {}  # idle slot -> keys of its chunks
        self._asked: dict[int, int] = {}  # slot -> first tokens of its text that were a prompt
        self.counters = PrefixCounters()
        # The last use of the newest text that made room for others and is in no tier, in seconds of
        # ``time.monotonic``; None if there is none. Texts that were used later are held.
        self.evicted_until: float | None = None
        self._slots = slots
        self._tree = PrefixTree()

    def match(self, request: Request) -> PrefixMatch:
        """Find the longest cached prefix of a request, except its last token, whose logits are needed."""
        usable = request.usable_prefix
        if not self.enabled or not usable:
            return PrefixMatch()
        # Told here and not at each step: there are many more steps than admissions.
        for slot, running in self._running.items():
            if not running.num_dropped:
                self._tree.set_computed(slot, running.num_computed)
        return self._tree.match(request.identity_slice(0, usable), request.kv_salt, self._slots.resume_point)

    def stored(self, request: Request) -> int:
        """Return how many first tokens of a request the tiers hold; looked up once each time it is queued."""
        if self._stored is None or not self.enabled or request.usable_prefix < request.num_tokens - 1:
            return 0
        if request.stored is None:
            request.stored = self._stored.available(self._chunk_keys(request, request.num_tokens - 1))
        return request.stored.tokens

    def make_room(self, num_tokens: int, spared: Collection[int] = ()) -> bool:
        """Trim running slots, then evict idle ones, then drop checkpoints of running ones.

        Until ``num_tokens`` more fit; return whether they do.

        Args:
            num_tokens: tokens to make room for.
            spared: slots that must not change.
        """
        while not self._slots.fits(num_tokens):
            wide = max(self._running.keys() - set(spared), key=self._trimmable, default=None)
            if wide is not None and self._trimmable(wide):
                self._trim(wide)
                continue
            slot = self._slots.oldest_idle(spared)
            if slot is not None:
                self._evict_oldest(slot)
            elif not self._slots.drop_state(self._running.keys() - set(spared)):
                return False
        return True

    def place(self, request: Request, match: PrefixMatch, headroom: int) -> bool:
        """Give the request a slot that holds its matched prefix; return False if there is no room.

        Args:
            request: ``slot`` and ``num_computed`` are set.
            match: the result of ``match`` for this request.
            headroom: further tokens that must fit.
        """
        wanted = request.num_tokens + headroom + self._slots.state_tokens + self._slots.fixed_tokens
        idle = [slot for slot in match.slots if self._slots.is_idle(slot)]
        own = min(idle, key=self._slots.tokens, default=None)
        takes = own is not None and self._loses_little(own, match, wanted)
        placed = not takes and self._copy(request, match, wanted)
        placed = placed or (own is not None and self._take_over(request, own, wanted))
        if placed:
            self._admitted(request, match)
        return placed

    def trim(self, request: Request) -> None:
        """Free the KV of a running request behind its windows."""
        if request.slot is not None and not request.num_dropped and self._trimmable(request.slot):
            self._trim(request.slot)

    def exclude(self, request: Request) -> None:
        """Exclude a running request from sharing, since some of its KV was evicted."""
        if self.enabled and request.slot is not None:
            self._tree.remove(request.slot)
            self._tree.insert(request.slot, request.identity_slice(0, 0), 0, request.kv_salt)
            self._tell(request)

    def replace(self, request: Request) -> None:
        """Record that the tokens of a running request have changed."""
        if self.enabled and request.slot is not None:
            self._tree.remove(request.slot)
            tokens = request.identity_slice(0, request.num_tokens)
            self._tree.insert(request.slot, tokens, request.num_computed, request.kv_salt)
            self._tell(request)

    def computed(self, request: Request) -> None:
        """Record that more tokens of a running request have KV."""
        blocks, slot = self._blocks, request.slot
        if blocks is None or slot is None or blocks.count(slot) == request.num_computed // CHUNK_TOKENS:
            return
        self._tell(request)

    def _tell(self, request: Request) -> None:
        """Tell which blocks the slot of a running request holds; pictures are in no block."""
        if self._blocks is None or not self.enabled or request.slot is None:
            return
        held = not request.num_dropped and request.images is None
        keys = self._chunk_keys(request, request.num_computed) if held else []
        self._blocks.hold(request.slot, keys, request)

    def leave(self, request: Request, *, keep: bool) -> None:
        """Take the slot of a request; it becomes idle, or free if ``keep`` is False or it has no KV."""
        self.computed(request)
        slot, request.slot = request.slot, None
        assert slot is not None  # noqa: S101 -- only called for running requests
        del self._running[slot]
        if self.enabled:
            self._tree.remove(slot)
        if not self.enabled or not keep or not request.num_computed or request.num_dropped:
            self._slots.free(slot)
            if self._blocks is not None:
                self._blocks.release(slot)
            return
        count = request.num_computed
        if self._slots.state_tokens:  # others are not computed
            self._slots.keep(slot, [length for length in self._slots.checkpoints(slot) if length < count])
        self._tree.insert(slot, request.identity_slice(0, count), count, request.kv_salt)
        shortest = self._slots.shortest
        for other in self._tree.prefixes(slot):
            covered = not self._slots.state_tokens and shortest.get(slot, 0) <= shortest.get(other, 0)
            if self._slots.is_idle(other) and covered:
                self.evict(other, save=False)
        self._slots.park(slot, count, request.pin_seconds)
        if self._stored is not None:
            self._keys[slot] = self._chunk_keys(request, count)
            if self._stored.shared:
                self._slots.save(slot, self._keys[slot], leaves=False)

    def evict(self, slot: int, *, save: bool = True) -> None:
        """Free an idle slot; with ``save``, copy its KV to the tiers first."""
        self._tree.remove(slot)
        keys = self._keys.pop(slot, None)
        if save and keys:
            self._slots.save(slot, keys)
        self._slots.evict(slot)
        if self._blocks is not None:
            self._blocks.release(slot)

    def _evict_oldest(self, slot: int) -> None:
        """Evict the slot that was not used for the longest time."""
        if self._stored is None:
            self.evicted_until = max(self._slots.idle_since(slot), self.evicted_until or 0.0)
        self.evict(slot)

    def clear(self, *, save: bool = False) -> None:
        """Free all idle slots."""
        for slot in self._slots.idle:
            self.evict(slot, save=save)

    def check_integrity(self) -> None:
        """Check that the prefix tree and the slots are consistent.

        Raises:
            RuntimeError: they are not; the message shows the difference.
        """
        self._tree.check_integrity()
        for slot in range(self._slots.num_slots):
            held = not self._slots.is_free(slot)
            if (slot in self._tree) != (held and self.enabled):
                raise RuntimeError(f"slot {slot}: in the prefix tree is {slot in self._tree}, held is {held}")
        if not self._keys.keys() <= set(self._slots.idle):
            raise RuntimeError(f"slots {sorted(self._keys)} have chunk keys, but are not all idle")
        for slot in self._slots.idle:
            facts = self._slots.tokens(slot), self._tree.length(slot), self._tree.computed(slot)
            if len(set(facts)) != 1:
                raise RuntimeError(
                    f"idle slot {slot} holds {facts[0]} tokens, the prefix tree says {facts[1:]}"
                )

    def _loses_little(self, slot: int, match: PrefixMatch, wanted: int) -> bool:
        """Whether taking over an idle slot loses less than a copy, which may cost another text its slot."""
        mostly = match.length >= _MIN_TAKE_OVER_SHARE * self._slots.tokens(slot)
        only_answer = match.length >= self._asked[slot]
        if self._slots.num_free and self._slots.fits(wanted):
            return mostly and only_answer
        return mostly or only_answer

    def _copy(self, request: Request, match: PrefixMatch, wanted: int) -> bool:
        """Give the request an empty slot with a copy of the matched prefix; return whether that worked."""
        running = (slot for slot in match.slots if not self._slots.is_idle(slot))
        source = next(running, match.slots[0] if match.slots else None)
        spared = [] if source is None else [source]
        available = self._slots.num_slots - self._slots.num_used - sum(map(self._slots.is_idle, spared))
        if not available or not self._could_fit(wanted, spared):
            return False
        self.make_room(wanted, spared)
        oldest = self._slots.oldest_idle(spared)
        if not self._slots.num_free and oldest is not None:
            self._evict_oldest(oldest)
        request.slot = self._slots.allocate(request.num_tokens)
        if source is not None:
            self._slots.fork(source, request.slot, match.length)
            if self._slots.is_idle(source):
                self._slots.touch(source)
        return True

    def _take_over(self, request: Request, slot: int, wanted: int) -> bool:
        """Give the request an idle slot with its KV; return whether that worked.

        Its checkpoints are dropped if need be. The request's first row still finds the one where it starts.
        """
        more = wanted - self._slots.tokens(slot) - self._slots.state_tokens - self._slots.fixed_tokens
        while not self.make_room(more, [slot]):
            if not self._slots.drop_state([slot]):
                return False
        self._tree.remove(slot)
        self._keys.pop(slot, None)
        self._slots.take_over(slot, request.num_tokens)
        request.slot = slot
        return True

    def _could_fit(self, num_tokens: int, spared: Collection[int]) -> bool:
        """Whether ``num_tokens`` fit after all slots except the ``spared`` ones are trimmed or evicted."""
        idle = sum(self._slots.worth(slot) for slot in self._slots.idle if slot not in spared)
        return self._slots.fits(
            num_tokens - idle - sum(map(self._trimmable, self._running.keys() - set(spared)))
        )

    def _admitted(self, request: Request, match: PrefixMatch) -> None:
        assert request.slot is not None  # noqa: S101 -- it has just got one
        request.num_computed = match.length
        self._running[request.slot] = request
        self._asked[request.slot] = request.usable_prefix
        if not self.enabled:
            return
        stored = self.stored(request)
        request.restorable = stored if stored - match.length >= _MIN_RESTORED else 0
        if self._slots.state_tokens:
            self._keep_states(request, request.slot, match)
        tokens = request.identity_slice(0, request.num_tokens)
        self._tree.insert(request.slot, tokens, match.length, request.kv_salt)
        self._tell(request)
        self.counters.prefix_queries += 1
        self.counters.prefix_hits += match.length > 0
        self.counters.prefix_cached_tokens += match.length

    def _keep_states(self, request: Request, slot: int, match: PrefixMatch) -> None:
        """Choose the lengths at which a request keeps states for later ones.

        They are the end of its prompt, since an answer may be rewritten; where its template says that later
        prompts leave it; where it continues another text; and where it leaves one that cannot be resumed
        there, since a third request may leave it there too. Tiers hold whole chunks, so for them another one
        is kept at the last chunk's end in the prompt.
        """
        earlier = [length for length in self._slots.checkpoints(slot) if length < match.length]
        start = max(match.length, request.restorable)  # nothing before is computed, so no state passes by
        wanted = set(earlier[-_MOST_CHECKPOINTS:])
        for left in request.resumption:
            wanted.update(max(([n] for n in earlier if n <= left), default=[]))
            if start + _MIN_JUNCTION <= left < request.usable_prefix:
                wanted.add(left)
        if slot in match.slots:  # taken over; the source of a copy keeps this state itself
            wanted.add(match.length)
        if request.usable_prefix > start:
            wanted.add(request.usable_prefix)
        if match.shared - start >= _MIN_JUNCTION:
            wanted.add(match.shared)
        if self._stored is not None:
            whole = request.usable_prefix // CHUNK_TOKENS * CHUNK_TOKENS
            junction = request.stored.kv if request.stored is not None else 0
            # A restore may fail, and then these lengths are computed too.
            wanted |= {n for n in (whole, junction) if n - match.length >= _MIN_STORED}
        self._slots.keep(slot, sorted(wanted))

    def keep_state(self, request: Request, length: int) -> None:
        """Keep the state of a running request at a chunk's end in its answer, in place of an earlier one.

        So the tiers get a state near the answer's end, at a copy of it in 64 tokens.
        """
        slot, prompt = request.slot, len(request.prompt_token_ids)
        if self._stored is None or slot is None or length % CHUNK_TOKENS or length <= prompt:
            return
        kept = self._slots.checkpoints(slot)
        others = [n for n in kept if n <= prompt or n % CHUNK_TOKENS]
        if length not in kept and (len(others) < len(kept) or self._slots.fits(self._slots.state_tokens)):
            self._slots.keep(slot, [*others, length])

    def _trimmable(self, slot: int) -> int:
        """Return how much KV behind its windows a running request can free, in tokens."""
        return self._slots.trimmable(slot, self._running[slot].num_computed)

    def _trim(self, slot: int) -> None:
        """Free KV behind the windows of a running request; save it to the tiers first, if there are any."""
        request = self._running[slot]
        if self._stored is not None and self.enabled:
            self._slots.save(slot, self._chunk_keys(request, request.num_computed))
        self._slots.trim(slot, request.num_computed)

    def _chunk_keys(self, request: Request, count: int) -> list[bytes]:
        """Return the keys of the full chunks among the request's first ``count`` tokens."""
        named = self._stored or self._blocks  # by the same identity
        assert named is not None  # noqa: S101 -- callers check
        if request.chunk_keys is None:
            request.chunk_keys = ChunkKeys(named.identity, request.kv_salt)
        return request.chunk_keys.extend(request.identity_slice(0, count))
