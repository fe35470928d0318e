"""The runner of slot graphs: decode rows run in batches, prompts in chunks, and bindings are reused.

A decode run over slots [first, first + count) binds views of ``SlotArrays``. ``lengths[slot]`` serves as
``seqlens_k`` of a decode run: that input is "tokens in the cache after the run, minus 1", which for one new
token is the length before the run.

    slots    0     1     2     3        rows: decode 0, decode 2, prompt 3
    run 1   [d     -     d]             slot 1 is a dummy row: it writes at its own next free position
    run 2                     [p p p]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
)
from ...errors import ProviderRuntimeError
from ..base import STEP_TOKENS, BestLogits, LoraMatrices, Row, Runner, RunnerConfig, RunnerInfo
from ..captures import no_capture
from ..kv.decoder_graph import DecoderGraph, chosen_context_length, read_slot_graph
from ..kv.kv_memory import KVSpec
from ..kv_groups import window_groups
from ..row_checks import check_rows
from . import ort
from .joint_prompts import can_join, joint_feeds
from .slot_arrays import Logits, SlotArrays
from .slot_bindings import SlotBindings
from .slot_lora import SlotLora
from .slot_memory import HostMemory, SlotBinding, SlotMemory
from .slot_policy import SlotPolicy

MemoryMaker = Callable[[Mapping[str, KVSpec], int, int], SlotMemory]


class SlotRunner(Runner):
    """The ``Runner`` of providers whose attention kernels work on slots in one shared buffer.

    Args:
        session: a session of a slot graph, opened with strict placement.
        config: options of the runner.
        source: the name of the model in error messages.
        memory: creates the memory for caches of given shapes, slots and positions.
        policy: how steps are cut into runs.
        decode_session: another session of the same model for decode runs; None uses ``session``.

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
        context_length = chosen_context_length(config.context_length, graph.context_length, source)
        self._kv = memory(graph.caches, config.max_slots, context_length)
        adapted = graph.lora_modules
        self._lora = SlotLora(adapted, config, self._kv) if adapted else None
        self._policy = policy or SlotPolicy()
        self.info = _info(graph, config, context_length, self._kv, self._policy)
        self.session = session
        self.decode_session = decode_session
        self.bindings = SlotBindings(self._kv, self._policy)
        self._arrays = SlotArrays(graph, self._kv.slots)
        self._lengths = self._arrays.lengths
        self._hidden_size = graph.hidden_size
        self._latest: dict[int, SlotBinding] = {}  # per slot, the run that computed its newest logits

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        return self._step(rows, frozenset())

    def forward_best(self, rows: Sequence[Row]) -> list[Logits | BestLogits]:
        """Run one step; see ``Runner``. A row that wants all logits makes its run download all."""
        late = {row.slot for row in rows if row.best_suffice}
        whole = self._step(rows, late)
        return [
            self._best_of(row.slot) if row.slot in late else logits
            for row, logits in zip(rows, whole, strict=True)
        ]

    def _step(self, rows: Sequence[Row], late: Collection[int]) -> list[Logits]:
        """Run one step; the logits of slots in ``late`` may stay on the device."""
        self._check(rows)
        singles = [row for row in rows if _is_decode(row)]
        results: dict[int, Logits] = {}
        try:
            self._kv.enter()
            # Decode first: a prompt row in a gap then overwrites what its dummy row wrote.
            self._decode(singles, late)
            for row in rows:
                results[row.slot] = self._arrays.logits[row.slot, : row.num_logits]
            for group in self._groups([row for row in rows if not _is_decode(row)]):
                if len(group) > 1:
                    results.update(self._prefill_together(group, late))
                else:
                    results[group[0].slot] = self._prefill(group[0], late=group[0].slot in late)
        except ort.runtime_errors() as error:
            # A binding that failed half-way ends the process when it is bound again.
            self.bindings.clear()
            raise ort.run_error(len(rows), error) from error
        except ProviderRuntimeError:
            self.bindings.clear()
            raise
        for row in rows:
            self._lengths[row.slot] = row.start + len(row.tokens)
        return [results[row.slot] for row in rows]

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; see ``Runner``."""
        if self._lora is None:
            raise ProviderRuntimeError("the graph was lowered without LoRA adapters")
        self._lora.write(place, matrices)

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache now, in bytes."""
        return self._kv.held_bytes(self._lengths)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length) from slot ``source`` to slot ``target``."""
        if length > self._lengths[source]:
            raise ProviderRuntimeError(f"slot {source} holds {self._lengths[source]} tokens, not {length}")
        self._kv.copy_prefix(source, target, length)
        self._lengths[target] = length

    def release(self, slot: int) -> None:
        """Free the slot's memory. Its content is lost."""
        self._lengths[slot] = 0
        self._kv.release(slot)

    def run_prompts_alone(self) -> None:
        """Give each new prompt a run of its own from now on."""
        self._policy = dataclasses.replace(self._policy, joint_prompts=False)

    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""
        with no_capture():  # a device frees the sessions
            self.bindings.clear()
            self._latest.clear()
            self.session = self.decode_session = None
            self._kv.close()

    def _check(self, rows: Sequence[Row]) -> None:
        """Check the rows, and cut each slot to the start of its row.

        Raises:
            ProviderRuntimeError: a row needs KV that its slot lacks.
        """
        if self.session is None:
            raise ProviderRuntimeError("the runner is closed")
        check_rows(rows, self.info, self._lengths, self._hidden_size)
        for row in rows:
            self._lengths[row.slot] = row.start

    def _decode(self, rows: list[Row], late: Collection[int]) -> None:
        positions = self._arrays.positions
        self._arrays.write(rows)
        if positions is not None:
            # A dummy row's position may lie beyond the rope table, and kernels do not check it.
            np.minimum(self._lengths, self.info.context_length - 1, out=positions[:, 0])
        full = self._lengths >= self.info.context_length
        for first, count in self._policy.ranges(sorted(row.slot for row in rows), full):
            longest = int(self._lengths[first : first + count].max()) + 1
            captured = self._policy.captures(first, count)
            self._arrays.total[...] = self.info.context_length if captured else longest
            session = self.decode_session or self.session
            run = self.bindings.decode(first, count, session, partial(self._bind_decode, first, count))
            mine = [row for row in rows if first <= row.slot < first + count]
            wanted = any(row.num_logits and row.slot not in late for row in mine)
            if self._lora is not None:
                self._lora.decode(run, mine, first, count)
            self._kv.prepare(first, count)
            run.run(session, () if wanted else (LOGITS,))
            self._latest.update((row.slot, run) for row in mine)

    def _groups(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Yield rows of several tokens, grouped by the run that they share."""
        able = [self._may_join(row) for row in rows]
        joint = [row for row, joins in zip(rows, able, strict=True) if joins]
        yield from ([row] for row, joins in zip(rows, able, strict=True) if not joins)
        joint.sort(key=lambda row: row.slot)
        for group in self._policy.adjacent([(row.slot, len(row.tokens)) for row in joint]):
            yield [joint[index] for index in group]

    def _may_join(self, row: Row) -> bool:
        return self._policy.joint_prompts and can_join(row) and row.start == 0 and row.num_logits <= 1

    def _prefill_together(self, rows: list[Row], late: Collection[int]) -> dict[int, Logits]:
        """Run new prompts of adjacent slots in one run, padded on the right; return the logits by slot.

        KV of padding is written after a row's tokens, and overwritten by the next tokens.
        """
        feeds = joint_feeds(rows, positions=self._arrays.positions is not None)
        wanted = feeds[LOGITS_POSITIONS].shape[1]
        first, count = rows[0].slot, len(rows)
        logits = self._arrays.logits[first : first + count]
        run = self.bindings.caches("prefill", first, count, self.session)
        if self._lora is not None:
            feeds |= self._lora.prompt(run, rows)
        results = {LOGITS: logits, **self._arrays.best_results(first, count, wanted)}
        unread = (LOGITS,) if all(row.slot in late or not row.num_logits for row in rows) else ()
        bound = self._kv.bind_once(run.binding, feeds, results, unread)
        self._kv.prepare(first, count)
        bound.run(self.session, unread)
        self._latest.update((row.slot, bound) for row in rows)
        return {row.slot: found[wanted - row.num_logits :] for row, found in zip(rows, logits, strict=True)}

    def _prefill(self, row: Row, *, late: bool) -> Logits:
        """Run one row of many tokens in chunks; return the logits of its last ``num_logits`` tokens."""
        size, spare = len(row.tokens), self._arrays.logits[row.slot : row.slot + 1]
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
        states = row.last_hidden_states
        kind = "prefill" if states is None else "prefill, hidden states"
        run = self.bindings.caches(kind, row.slot, 1, self.session)
        feeds: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.ascontiguousarray(row.tokens[begin:end], np.int64)[None],
            SEQLENS_K: np.array([row.start + end - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(row.start + end, np.int32),
            LOGITS_POSITIONS: np.arange(count - logits.shape[1], count, dtype=np.int64)[None],
        }
        if self._lora is not None:
            feeds |= self._lora.prompt(run, [row])
        if self._arrays.positions is not None:
            feeds[POSITION_IDS] = np.arange(row.start + begin, row.start + end, dtype=np.int64)[None]
        if row.hidden_states is not None:
            feeds[HIDDEN_STATES] = np.ascontiguousarray(row.hidden_states[begin:end], np.float32)[None]
        results = {LOGITS: logits, **self._arrays.best_results(row.slot, 1, logits.shape[1])}
        if states is not None:
            results[LAST_HIDDEN_STATE] = states[None, begin:end]
        bound = self._kv.bind_once(run.binding, feeds, results, late)
        self._kv.prepare(row.slot, 1)
        bound.run(self.session, late)
        self._latest[row.slot] = bound

    def _best_of(self, slot: int) -> BestLogits:
        return self._arrays.best_of(slot, partial(self._fetch, slot, self._latest[slot]))

    def _fetch(self, slot: int, run: SlotBinding) -> Logits:
        try:
            run.fetch(LOGITS)
        except ort.runtime_errors() as error:
            raise ProviderRuntimeError(f"logits could not be downloaded: {ort.one_line(error)}") from error
        logits: Logits = self._arrays.logits[slot, 0]
        return logits

    def _bind_decode(self, first: int, count: int, run: SlotBinding) -> SlotBinding:
        """Bind the step's arrays of slots [first, first + count) to a run that has their caches."""
        feeds, results = self._arrays.feeds(first, count), self._arrays.results(first, count)
        if self._lora is not None:
            feeds |= self._lora.step_feeds(slice(first, first + count))
        capture = self._policy.captures(first, count)
        return self._kv.bind_step(run.binding, feeds, results, capture=capture)


def _info(
    graph: DecoderGraph, config: RunnerConfig, context_length: int, memory: SlotMemory, policy: SlotPolicy
) -> RunnerInfo:
    layers = [(spec.window or 0, spec.bytes_per_token) for spec in graph.caches.values()]
    return graph.info(
        config,
        window_groups(layers, step=0),
        length=context_length,
        slots=memory.slots,
        batched_multi_token=False,
        on_device=not isinstance(memory, HostMemory),
        step_tokens=max(STEP_TOKENS, policy.prefill_chunk),
    )


def _is_decode(row: Row) -> bool:
    """Whether the row may share a decode run."""
    return len(row.tokens) == 1 and row.last_hidden_states is None
