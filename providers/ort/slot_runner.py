"""The runner of slot graphs: decode rows run in batches, prompts in chunks, and bindings are reused.

All persistent arrays are indexed by slot, so a decode run over slots [first, first + count) binds views of
them, and a step only writes a few integers. ``lengths[slot]`` is ``seqlens_k`` of a decode run without
change: that input is "tokens in the cache after the run, minus 1", which for one new token is the length
before the run.

    slots    0     1     2     3        rows: decode 0, decode 2, prompt 3
    run 1   [d     -     d]             slot 1 is a dummy row: it writes at its own next free position
    run 2                     [p p p]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    CACHE_ROWS,
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LOGITS_POSITIONS,
    LOGSUMEXP,
    POSITION_IDS,
    SEQLENS_K,
    TOP_LOGITS,
    TOP_TOKEN_IDS,
    TOTAL_SEQUENCE_LENGTH,
)
from ...errors import ProviderRuntimeError, UsageError
from ..base import (
    BestLogits,
    KVEviction,
    LoraMatrices,
    Row,
    RunnerConfig,
    RunnerInfo,
)
from ..captures import no_capture
from ..kv.kv_memory import TRIM_STEP, KVSpec
from ..kv.slot_graph import SlotGraph, read_slot_graph
from ..lora import lora_facts
from ..row_checks import check_rows, rows_in_cache
from . import ort
from .joint_prompts import can_join, joint_feeds
from .slot_lora import SlotLora
from .slot_memory import BoundRun, HostMemory, SlotMemory
from .slot_policy import SlotPolicy

_MAX_BINDINGS = 128

Logits = npt.NDArray[np.float32]
MemoryMaker = Callable[[Mapping[str, KVSpec], int, int], SlotMemory]


class SlotRunner:
    """The ``Runner`` of providers whose attention kernels work on slots in one shared buffer.

    Args:
        session: a session of a slot graph, opened with strict placement.
        config: options of the runner.
        source: the name of the model in error messages.
        memory: creates the memory for caches of given shapes, slots and positions.
        policy: how steps are cut into runs.
        decode_session: another session of the same model for runs of few rows, see ``policy.narrow_rows``;
            None uses ``session``.

    Raises:
        GraphError: the graph is not a slot graph.
        UsageError: the context length is unknown or exceeds the model's.
    """

    def __init__(
        self,
        session: Any,
        config: RunnerConfig,
        source: str,
        *,
        memory: MemoryMaker = HostMemory,
        policy: SlotPolicy | None = None,
        decode_session: Any = None,
    ) -> None:
        graph = read_slot_graph(session, source)
        context_length = _context_length(config, graph, source)
        self._kv = memory(graph.caches, config.max_slots, context_length)
        adapted = graph.lora_modules
        self._lora = SlotLora(adapted, config, self._kv) if adapted else None
        self.info = RunnerInfo(
            vocab_size=graph.vocab_size,
            context_length=context_length,
            max_slots=self._kv.slots,
            kv_bytes_per_token=graph.kv_bytes_per_token,
            batched_multi_token=False,
            kv_layout=self._kv.layout,
            top_logits=graph.top_logits,
            embedding_size=graph.embedding_size,
            num_tokens=graph.num_tokens,
            on_device=not isinstance(self._kv, HostMemory),
            evicts_kv=graph.takes_positions and self._kv.evicts_kv,
            sliding_window=max(spec.window or 0 for spec in graph.caches.values()),
            trim_step=TRIM_STEP * self._kv.trims,
            window_bytes_per_token=sum(spec.bytes_per_token for spec in graph.caches.values() if spec.window),
            **lora_facts(adapted, config),
        )
        self._session = session
        self._decode_session = decode_session
        self._policy = policy or SlotPolicy()
        self._bindings: dict[tuple[str, int, int], BoundRun] = {}
        self._ids = np.zeros((self._kv.slots, 1), np.int64)
        self._positions = np.zeros((self._kv.slots, 1), np.int64) if graph.takes_positions else None
        self._lengths = np.zeros(self._kv.slots, np.int32)  # tokens in the cache
        self._dropped = np.zeros(self._kv.slots, np.int32)  # evicted tokens
        self._settled = np.zeros(self._kv.slots, np.int32)  # KV before this position may be missing
        self._total = np.zeros((), np.int32)
        self._cache_rows = np.arange(self._kv.slots) if graph.takes_cache_rows else None
        self._first_position = np.zeros((self._kv.slots, 1), np.int64)
        self._hidden_size = graph.hidden_size
        hidden = (self._kv.slots, 1, graph.hidden_size or 0)
        self._hidden = None if graph.hidden_size is None else np.zeros(hidden, np.float32)
        self._logits = np.empty((self._kv.slots, 1, graph.vocab_size), np.float32)
        self._best = _best_results(self._kv.slots, 1, graph.top_logits)
        self._latest: dict[int, BoundRun] = {}  # per slot, the run that computed its newest logits

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        return self._step(rows, frozenset())

    def forward_best(self, rows: Sequence[Row]) -> list[Logits | BestLogits]:
        """Run one step; see ``BestLogitsRunner``. A row that wants all logits makes its run download all."""
        late = {row.slot for row in rows if row.best_suffice}
        whole = self._step(rows, late)
        return [
            self._best_of(row.slot) if row.slot in late else logits
            for row, logits in zip(rows, whole, strict=True)
        ]

    def _step(self, rows: Sequence[Row], late: Collection[int]) -> list[Logits]:
        """Run one step; the logits of slots in ``late`` may stay on the device."""
        rows = self._rows_in_cache(rows)
        singles = [row for row in rows if _is_decode(row)]
        results: dict[int, Logits] = {}
        try:
            self._kv.enter()
            # Decode first: a prompt row in a gap then overwrites what its dummy row wrote.
            self._decode(singles, late)
            for row in rows:
                results[row.slot] = self._logits[row.slot, : row.num_logits]
            for group in self._groups([row for row in rows if not _is_decode(row)]):
                if len(group) > 1:
                    results.update(self._prefill_together(group))
                else:
                    results[group[0].slot] = self._prefill(group[0], late=group[0].slot in late)
        except ort.runtime_errors() as error:
            # A binding that failed half-way ends the process when it is bound again.
            self._bindings.clear()
            raise ProviderRuntimeError(f"a run of {len(rows)} rows failed: {ort.one_line(error)}") from error
        except ProviderRuntimeError:
            self._bindings.clear()
            raise
        for row in rows:
            self._lengths[row.slot] = row.start + len(row.tokens)
        return [results[row.slot] for row in rows]

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; see ``AdaptingRunner``."""
        if self._lora is None:
            raise ProviderRuntimeError("the graph was lowered without LoRA adapters")
        self._lora.write(place, matrices)

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache now, in bytes."""
        return self._kv.held_bytes(self._lengths)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length) from slot ``source`` to slot ``target``."""
        held = int(self._lengths[source] + self._dropped[source])
        if not self._settled[source] <= length <= held:
            raise ProviderRuntimeError(f"slot {source} holds {held} tokens, not {length}")
        rows = length - int(self._dropped[source])
        self._kv.copy_prefix(source, target, rows)
        self._lengths[target] = rows
        self._dropped[target], self._settled[target] = self._dropped[source], self._settled[source]

    def trim(self, slot: int, length: int) -> None:
        """Free KV that tokens from ``length`` on do not attend to; see ``TrimmingRunner``."""
        self._kv.trim(slot, length - int(self._dropped[slot]))
        self._settled[slot] = max(length, int(self._settled[slot]))

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Evict KV of tokens before ``length``; see ``EvictingRunner``."""
        held = length - int(self._dropped[slot])
        if not eviction.sinks + eviction.recent <= eviction.kept <= held <= self._lengths[slot]:
            raise ProviderRuntimeError(
                f"slot {slot} holds {self._lengths[slot]} tokens, so {eviction} of {held} is impossible"
            )
        self._kv.evict_kv(slot, held, eviction)
        self._lengths[slot] = eviction.kept
        self._dropped[slot] = length - eviction.kept
        self._settled[slot] = length

    def release(self, slot: int) -> None:
        """Free the slot's memory. Its content is lost."""
        self._lengths[slot] = self._dropped[slot] = self._settled[slot] = 0
        self._kv.release(slot)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return KV of positions [start, start + length); see ``MovableRunner``."""
        if start + length > self._lengths[slot] or self._dropped[slot] or start < self._settled[slot]:
            raise ProviderRuntimeError(
                f"slot {slot} holds {self._lengths[slot]} tokens, not {start + length}"
            )
        return self._kv.read(slot, start, length)

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write KV of positions [start, start + length); see ``MovableRunner``."""
        fits = self._settled[slot] <= start <= self._lengths[slot] and not self._dropped[slot]
        if not fits or start + length > self.info.context_length:
            raise ProviderRuntimeError(f"positions [{start}, {start + length}) do not continue slot {slot}")
        self._lengths[slot] = start
        try:
            self._kv.write(slot, start, length, parts)
        except ValueError as error:
            raise ProviderRuntimeError(f"the KV has another layout: {error}") from error
        self._lengths[slot] = start + length

    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""
        with no_capture():  # a device frees the sessions
            self._bindings.clear()
            self._latest.clear()
            self._session = self._decode_session = None
            self._kv.close()

    def _rows_in_cache(self, rows: Sequence[Row]) -> list[Row]:
        """Check the rows, cut each slot to the start of its row, and return rows with starts in the cache.

        Raises:
            ProviderRuntimeError: a row needs KV that its slot lacks.
        """
        if self._session is None:
            raise ProviderRuntimeError("the runner is closed")
        check_rows(rows, self.info, self._lengths + self._dropped, self._hidden_size)
        shifted = rows_in_cache(rows, self._dropped, self._settled)
        for row in shifted:
            self._lengths[row.slot] = row.start
        return shifted

    def _decode(self, rows: list[Row], late: Collection[int]) -> None:
        for row in rows:
            self._ids[row.slot, 0] = row.tokens[0]
            if self._hidden is not None:
                self._hidden[row.slot] = row.hidden_states
        if self._positions is not None:
            # A dummy row's position may lie beyond the rope table, and kernels do not check it.
            np.minimum(self._lengths + self._dropped, self.info.context_length - 1, out=self._positions[:, 0])
        full = self._lengths >= self.info.context_length
        for first, count in self._policy.ranges(sorted(row.slot for row in rows), full):
            longest = int(self._lengths[first : first + count].max()) + 1
            captured = self._policy.captures(first, count)
            self._total[...] = self.info.context_length if captured else longest
            run = self._decode_run(first, count)
            mine = [row for row in rows if first <= row.slot < first + count]
            wanted = any(row.num_logits and row.slot not in late for row in mine)
            if self._lora is not None:
                self._lora.decode(run, mine, first, count)
            self._kv.prepare(first, count)
            run.run(self._session_for("decode", count), () if wanted else (LOGITS,))
            self._latest.update((row.slot, run) for row in mine)

    def _groups(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Yield rows of several tokens, grouped by the run that they share."""
        able = [self._cache_rows is not None and can_join(row) for row in rows]
        joint = [row for row, joins in zip(rows, able, strict=True) if joins]
        yield from ([row] for row, joins in zip(rows, able, strict=True) if not joins)
        # Positions of padding include evicted tokens.
        extents = [(row.start + int(self._dropped[row.slot]), len(row.tokens)) for row in joint]
        for group in self._policy.groups(extents, self.info.context_length):
            yield [joint[index] for index in group]

    def _prefill_together(self, rows: list[Row]) -> dict[int, Logits]:
        """Run rows of several tokens in one run, padded on the right; return the logits by slot.

        KV of padding is written after a row's tokens, and overwritten by the next tokens.
        """
        positions = None if self._positions is None else [row.start + self._dropped[row.slot] for row in rows]
        feeds = joint_feeds(rows, positions)
        ids, wanted = feeds[INPUT_IDS], feeds[LOGITS_POSITIONS].shape[1]
        logits = np.empty((len(rows), wanted, self.info.vocab_size), np.float32)
        kind = "short" if ids.size <= self._policy.narrow_tokens else "prefill"
        run = self._bound(kind, 0, self._kv.slots)
        if self._lora is not None:
            feeds |= self._lora.prompt(run, rows)
        self._kv.prepare(0, self._kv.slots)
        self._kv.bind_once(run.binding, feeds, {LOGITS: logits}).run(self._session_for(kind, len(rows)))
        return {row.slot: found[wanted - row.num_logits :] for row, found in zip(rows, logits, strict=True)}

    def _prefill(self, row: Row, *, late: bool) -> Logits:
        """Run one row of many tokens in chunks; return the logits of its last ``num_logits`` tokens."""
        size, spare = len(row.tokens), self._logits[row.slot : row.slot + 1]
        logits = (
            spare if row.num_logits == 1 else np.empty((1, row.num_logits, self.info.vocab_size), np.float32)
        )
        first_wanted = size - row.num_logits
        for begin, end in self._policy.pieces(row.start, size):
            part = logits[:, max(0, begin - first_wanted) : max(0, end - first_wanted)]
            # A graph must compute at least one logit row; an unwanted one is written to the decode buffer.
            unread = late or not part.size
            self._run_piece(row, begin, end, part if part.size else spare, (LOGITS,) if unread else ())
        return logits.reshape(row.num_logits, self.info.vocab_size)

    def _run_piece(self, row: Row, begin: int, end: int, logits: Logits, late: Collection[str]) -> None:
        """Run tokens [begin, end) of a row; fill ``logits`` from the last ones."""
        count = end - begin
        kind = "short" if count <= self._policy.narrow_tokens else "prefill"
        states = row.last_hidden_states
        kind = kind if states is None else f"{kind}, hidden states"
        run = self._bound(kind, row.slot, 1)
        feeds: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.ascontiguousarray(row.tokens[begin:end], np.int64)[None],
            SEQLENS_K: np.array([row.start + end - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(row.start + end, np.int32),
            LOGITS_POSITIONS: np.arange(count - logits.shape[1], count, dtype=np.int64)[None],
        }
        if self._lora is not None:
            feeds |= self._lora.prompt(run, [row])
        if self._cache_rows is not None:
            feeds[CACHE_ROWS] = self._cache_rows[:1]
        if self._positions is not None:
            first = row.start + int(self._dropped[row.slot])
            feeds[POSITION_IDS] = np.arange(first + begin, first + end, dtype=np.int64)[None]
        if row.hidden_states is not None:
            feeds[HIDDEN_STATES] = np.ascontiguousarray(row.hidden_states[begin:end], np.float32)[None]
        results = {LOGITS: logits, **self._best_results(row.slot, logits.shape[1])}
        if states is not None:
            results[LAST_HIDDEN_STATE] = states[None, begin:end]
        bound = self._kv.bind_once(run.binding, feeds, results, late)
        self._kv.prepare(row.slot, 1)
        bound.run(self._session_for(kind, 1), late)
        self._latest[row.slot] = bound

    def _best_results(self, slot: int, wanted: int) -> Mapping[str, npt.NDArray[Any]]:
        """Return the arrays for the largest logits of a prompt's run: for one position the slot's own."""
        if wanted == 1:
            return {name: array[slot : slot + 1] for name, array in self._best.items()}
        return _best_results(1, wanted, self.info.top_logits)

    def _best_of(self, slot: int) -> BestLogits:
        return BestLogits(
            self._best[TOP_TOKEN_IDS][slot, 0],
            self._best[TOP_LOGITS][slot, 0],
            float(self._best[LOGSUMEXP][slot, 0]),
            self.info.vocab_size,
            partial(self._fetch, slot, self._latest[slot]),
        )

    def _fetch(self, slot: int, run: BoundRun) -> Logits:
        try:
            run.fetch(LOGITS)
        except ort.runtime_errors() as error:
            raise ProviderRuntimeError(f"logits could not be downloaded: {ort.one_line(error)}") from error
        logits: Logits = self._logits[slot, 0]
        return logits

    def _decode_run(self, first: int, count: int) -> BoundRun:
        key = ("decode", first, count)
        if key not in self._bindings:
            run, part = self._bound(*key), slice(first, first + count)
            feeds: dict[str, npt.NDArray[Any]] = {
                INPUT_IDS: self._ids[part],
                SEQLENS_K: self._lengths[part],
                TOTAL_SEQUENCE_LENGTH: self._total,
                LOGITS_POSITIONS: self._first_position[part],
            }
            if self._lora is not None:
                feeds |= self._lora.step_feeds(part)
            if self._cache_rows is not None:
                feeds[CACHE_ROWS] = self._cache_rows[:count]
            if self._positions is not None:
                feeds[POSITION_IDS] = self._positions[part]
            if self._hidden is not None:
                feeds[HIDDEN_STATES] = self._hidden[part]
            results = {LOGITS: self._logits[part]} | {name: x[part] for name, x in self._best.items()}
            capture = self._policy.captures(first, count)
            self._bindings[key] = self._kv.bind_step(run.binding, feeds, results, capture=capture)
        return self._bindings[key]

    def _session_for(self, kind: str, count: int) -> Any:
        narrow = kind.startswith("short") or (kind == "decode" and count <= self._policy.narrow_rows)
        return (self._decode_session if narrow else None) or self._session

    def _bound(self, kind: str, first: int, count: int) -> BoundRun:
        """Return an IO binding with the caches of slots [first, first + count).

        Up to 128 are kept, and those of captured runs always: another binding would be captured again.
        """
        key = (kind, first, count)
        if key not in self._bindings:
            if len(self._bindings) >= _MAX_BINDINGS:
                free = [key for key in self._bindings if not self._is_captured(*key)]
                self._bindings.pop((free or list(self._bindings))[0])
            binding = self._session_for(kind, count).io_binding()
            self._kv.bind_caches(binding, first, count)
            self._bindings[key] = BoundRun(binding)
        return self._bindings[key]

    def _is_captured(self, kind: str, first: int, count: int) -> bool:
        return kind == "decode" and self._policy.captures(first, count)


def _is_decode(row: Row) -> bool:
    """Whether the row may share a decode run."""
    return len(row.tokens) == 1 and row.last_hidden_states is None


def _best_results(rows: int, wanted: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return arrays for the outputs that ``TopLogitsPass`` adds; none if ``count`` is 0."""
    if not count:
        return {}
    return {
        TOP_LOGITS: np.empty((rows, wanted, count), np.float32),
        TOP_TOKEN_IDS: np.empty((rows, wanted, count), np.int64),
        LOGSUMEXP: np.empty((rows, wanted), np.float32),
    }


def _context_length(config: RunnerConfig, graph: SlotGraph, source: str) -> int:
    asked, known = config.context_length, graph.context_length
    if asked is None and known is None:
        raise UsageError(f"{source} does not state its context length; set RunnerConfig.context_length")
    if asked is not None and known is not None and asked > known:
        raise UsageError(f"context length {asked} exceeds {known}, for which {source} was lowered")
    length = asked or known
    if length is None or length < 1:
        raise UsageError(f"context length must be positive, not {asked}")
    return length
