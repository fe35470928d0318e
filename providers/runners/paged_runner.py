"""The runner on a paged KV cache: one run per step for all rows, prompts and decode rows together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ...records import dataclass
from ..base import BestLogits, Draw, KVEviction, LoraMatrices, Pending, Row, Runner, RunnerInfo
from ..captures import no_capture
from ..image_rows import image_ahead, image_inputs, rope_positions
from ..kv.block_pool import FREED, BlockTables
from ..kv.encoder_rows import EncoderBatch, EncoderRows
from ..kv.state_memory import StateMemory
from ..lora import LoraInputs, LoraPlaces
from ..row_checks import check_rows, rows_in_cache
from .replays import Replays

Logits = npt.NDArray[np.float32]
GroupBlocks = Sequence[Sequence[int]]  # by group of layers, blocks of a slot
_GRAIN = 64  # positions; see ``start`` of ``Runner.read_kv``


@dataclass(frozen=True, slots=True)
class Span:
    """Positions in the blocks that hold them.

    Args:
        first: the first position, counted from the start of the first block.
        length: their number.
    """

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The rows of a step as one flat batch.

    Args:
        input_ids: [tokens].
        position_ids: [tokens].
        logits_positions: [wanted], indices into the flat batch, at least one.
        past_lens: [rows], tokens in the cache before the run.
        begins: [rows + 1], the start of each row in the batch, and the end of the last.
        tables: by group of layers, the blocks of each row in the order of its positions; ``FREED`` behind
            the group's window.
        hidden_states: [tokens, hidden_size], if the graph takes them.
        last_hidden_states: [tokens, hidden_width], filled by the run; None if they are not wanted.
        lora: the inputs for LoRA adapters; None if the graph has none.
        state_places: [rows], the places of the rows' recurrent states; None if the graph has none.
        image_states: see ``image_inputs``; None if the graph takes no pictures.
        image_rows: [tokens], see there.
        image_ahead: [tokens], see there; None if the graph takes none.
        encoder: the inputs for cross-attention; None if the graph has none.
        rope_positions: [axes, tokens]; None if the graph takes positions of one axis.
        late: [wanted], for which of the logits the largest may be enough; empty if for none.
        draws: [wanted], how the device draws a token; empty if it draws none.
        sources: [tokens], which of the tokens drawn before is run where ``input_ids`` is negative; None if it
            is nowhere.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    logits_positions: npt.NDArray[np.int64]
    past_lens: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]
    tables: list[list[list[int]]]
    hidden_states: npt.NDArray[np.float32] | None
    last_hidden_states: npt.NDArray[np.float32] | None = None
    lora: LoraInputs | None = None
    state_places: npt.NDArray[np.int32] | None = None
    encoder: EncoderBatch | None = None
    image_states: npt.NDArray[np.float32] | None = None
    image_rows: npt.NDArray[np.int64] | None = None
    image_ahead: npt.NDArray[np.int32] | None = None
    rope_positions: npt.NDArray[np.int64] | None = None
    late: Sequence[bool] = ()
    draws: Sequence[Draw | None] = ()
    sources: npt.NDArray[np.int64] | None = None

    @property
    def max_context(self) -> int:
        """The maximum number of tokens of any row after the run."""
        return int((self.past_lens + np.diff(self.begins)).max())

    def without_freed(self, block_size: int) -> PagedBatch:
        """Return the batch without the freed blocks at the start of its only tables.

        For kernels that may read what they hide. They count windows in rows of the cache, so leading blocks
        can be left out; positions are an input.
        """
        (tables,) = self.tables
        freed = [table.count(FREED) for table in tables]
        if not any(freed):
            return self
        past = self.past_lens - block_size * np.array(freed, np.int32)
        kept = [table[count:] for table, count in zip(tables, freed, strict=True)]
        return dataclasses.replace(self, past_lens=past, tables=[kept])


class PagedSession(Protocol):
    """A compiled paged graph with its caches on the device.

    Blocks are numbered within a group of layers (``RunnerInfo.kv_groups``). All methods raise
    ``ProviderRuntimeError`` on failure.
    """

    def run(self, batch: PagedBatch) -> Logits | list[Logits | BestLogits]:
        """Run once; return logits [wanted, vocab_size], which the next run may overwrite.

        If ``batch.late`` is not empty, return a list by wanted position: the largest logits, or all logits
        [vocab_size].
        """

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy the content of a block in all caches of a group."""

    def read_blocks(self, blocks: GroupBlocks, span: Span) -> list[npt.NDArray[Any]]:
        """Return the content of positions in blocks on the host, one array per cache.

        Sessions whose blocks have at most 64 positions return whole blocks.
        """

    def write_blocks(self, blocks: GroupBlocks, span: Span, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the result of ``read_blocks``."""

    def evict_kv(self, blocks: GroupBlocks, targets: GroupBlocks, held: int, eviction: KVEviction) -> None:
        """Evict KV of all layers, see ``BlockLayer.evict_kv``; only if ``RunnerInfo.evicts_kv`` is set."""


class PagedFlight(Protocol):
    """A run that was begun."""

    drawn: npt.NDArray[np.int64]  # [wanted], after ``finish``

    def finish(self) -> Logits | list[Logits | BestLogits]:
        """Return what ``PagedSession.run`` does, when the run is done; to be called once."""


class AheadSession(PagedSession, Protocol):
    """A session that takes one more run while another is not finished; runs are computed in order."""

    def begin(self, batch: PagedBatch) -> PagedFlight:
        """Begin a run; its results stay valid until the second next one is begun."""


def _most_tokens(tables: BlockTables, info: RunnerInfo) -> int | None:
    """Return how many tokens always fit, in any distribution over slots; None if only slots are a limit."""
    if info.kv_tokens is not None:  # states share a budget with KV
        return info.kv_tokens
    if tables.num_blocks * tables.block_size >= info.max_slots * info.context_length:
        return None
    # The last block of each slot may be partly empty.
    return max(1, tables.num_blocks - info.max_slots) * tables.block_size


class PagedRunner(Runner):
    """The ``Runner`` of paged graphs; it keeps the block table of each slot.

    Args:
        session: a paged graph with its caches.
        tables: tables over as many blocks as the caches have, for one group of layers or those of ``info``.
        info: sizes and abilities of the model.
        hidden_size: width of the input ``hidden_states``; None if the graph has none.
        loras: the adapters' places; None if the graph takes no adapters.
        states: the recurrent states; None if the graph has none.
        ahead: the session, if steps are taken ahead (``info.steps_ahead``).
        encoder: which encoder's rows the slots have; None if the graph has no cross-attention.
    """

    def __init__(
        self,
        session: PagedSession,
        tables: BlockTables,
        info: RunnerInfo,
        hidden_size: int | None = None,
        loras: LoraPlaces | None = None,
        states: StateMemory | None = None,
        ahead: AheadSession | None = None,
        encoder: EncoderRows | None = None,
    ) -> None:
        self._encoder = encoder
        self._states, self._ahead, self._replays = states, ahead, Replays()
        self._flying: list[_Step] = []  # at most two
        self.info = dataclasses.replace(info, kv_tokens=_most_tokens(tables, info))
        self._hidden_size = hidden_size
        self._tables = tables
        self._loras = loras
        self.session: PagedSession | None = session
        self._dropped = np.zeros(info.max_slots, np.int32)  # evicted tokens
        self._settled = np.zeros(info.max_slots, np.int32)  # KV before this position may be missing

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        if self._states is None:
            return [np.asarray(logits) for logits in self._run(*self._check(rows))]
        extended = self._replays.extended(rows)
        logits = self._run_with_states(extended)
        self._replays.ran(rows, extended)
        return logits

    def _run_with_states(self, rows: Sequence[Row]) -> list[Logits]:
        """Run rows whose layers have states: a state is known only where a run ends."""
        session, _, placed = self._check(rows)
        if not any(n > row.start for row in rows for n in row.checkpoints):
            return [np.asarray(logits) for logits in self._run(session, rows, placed)]
        results: list[list[Logits]] = [[] for _ in rows]
        for pieces in _runs(rows):
            parts = list(pieces.values())
            for index, logits in zip(pieces, self._run(session, parts, parts), strict=True):
                results[index].append(np.array(logits))
        return [np.concatenate(parts) for parts in results]

    def forward_best(self, rows: Sequence[Row]) -> list[Logits | BestLogits]:
        """Run one step; see ``Runner``."""
        if not self.info.top_logits or not any(row.best_suffice for row in rows):
            return [*self.forward(rows)]
        session, _, placed = self._check(rows)
        late = [row.best_suffice for row in rows for _ in range(row.num_logits)]
        return self._best(rows, self._run(session, rows, placed, late))

    def submit(self, rows: Sequence[Row]) -> Pending[list[Logits | BestLogits]]:
        """Begin one step; see ``Runner``."""
        if self._ahead is None:
            return super().submit(rows)
        _, _, placed = self._check(rows)
        before = self._flying[-1] if self._flying else None
        batch = self._placed(self._ahead, placed)
        ends = np.cumsum([row.num_logits for row in rows])  # in the wanted logits
        draws = [
            row.draw if end == row.num_logits else None
            for row in rows
            for end in range(1, row.num_logits + 1)
        ]
        late = [row.best_suffice for row in rows for _ in range(row.num_logits)]
        batch = dataclasses.replace(batch, draws=draws, late=late if any(late) else ())
        if before is not None and any(row.source is not None for row in rows):
            batch = _with_sources(batch, rows, before)
        step = _Step(self._ahead.begin(batch), before, (ends - 1).tolist())
        self._flying.append(step)
        for row in placed:
            self._tables.lengths[row.slot] = row.start + len(row.tokens)
        return Pending(lambda: self._finish(step, rows, batch))

    def _finish(self, step: _Step, rows: Sequence[Row], batch: PagedBatch) -> list[Logits | BestLogits]:
        """Wait for a step that was submitted."""
        try:
            step.failed = True
            logits = step.flight.finish()
            step.drawn = step.flight.drawn.copy()  # the second next step overwrites it
            if step.before is not None and step.before.failed:
                raise ProviderRuntimeError("the step before failed, on which this one depends")
            step.failed = False
        finally:
            self._flying.remove(step)
            before, step.before = step.before, None
        for row in rows:
            if row.source is not None and before is not None:
                row.tokens[:] = before.drawn[before.places[row.source]]
        if batch.last_hidden_states is not None:
            _fill_hidden_states(rows, batch, batch.last_hidden_states)
        parts = self._parts(rows, logits)
        return self._best(rows, parts) if batch.late else parts

    def _best(self, rows: Sequence[Row], parts: Sequence[Any]) -> list[Logits | BestLogits]:
        """Return the largest or all logits of each row, given a list of them for each."""
        results: list[Logits | BestLogits] = []
        for row, part in zip(rows, parts, strict=True):
            if row.best_suffice:
                results += part
            else:
                results.append(np.array(part, np.float32).reshape(row.num_logits, self.info.vocab_size))
        return results

    def _placed(self, session: PagedSession, placed: Sequence[Row]) -> PagedBatch:
        """Give rows with starts in the cache their blocks, and return them as one flat batch."""
        ends = []
        for row in placed:
            self._tables.truncate(row.slot, row.start)
            ends.append((row.slot, row.start + len(row.tokens)))
        for copy in self._tables.reserve(ends):
            session.copy_block(*copy)
        return self._batch(placed)

    def _run(
        self, session: PagedSession, rows: Sequence[Row], placed: Sequence[Row], late: Sequence[bool] = ()
    ) -> list[Any]:
        """Run rows once, given also with their starts in the cache; return the logits of each."""
        batch = dataclasses.replace(self._placed(session, placed), late=late)
        if self._encoder is not None:
            batch = dataclasses.replace(batch, encoder=self._encoder.begin(rows))
        if self._states is not None:
            places = [self._states.begin(row) for row in rows]
            batch = dataclasses.replace(batch, state_places=np.array(places, np.int32))
        logits = session.run(batch)
        if self._encoder is not None:
            self._encoder.end()
        for row in placed:
            self._tables.lengths[row.slot] = row.start + len(row.tokens)
        if self._states is not None:
            for row, place in zip(rows, places, strict=True):
                self._states.end(row, place)
        if batch.last_hidden_states is not None:
            _fill_hidden_states(rows, batch, batch.last_hidden_states)
        return self._parts(rows, logits)

    @staticmethod
    def _parts(rows: Sequence[Row], logits: Any) -> list[Any]:
        """Cut the wanted logits of all rows."""
        results: list[Any] = []
        begin = 0
        for row in rows:
            results.append(logits[begin : begin + row.num_logits])
            begin += row.num_logits
        return results

    @property
    def kv_bytes(self) -> int:
        """Memory of the used blocks and states in bytes; shared ones count once."""
        states = 0 if self._states is None else self._states.used * self.info.state_bytes
        states += 0 if self._encoder is None else self._encoder.used_bytes
        used = [self._tables.num_blocks - free for free in self._tables.free_blocks]
        if len(used) == 1:  # one table for all groups
            return states + used[0] * self._tables.block_size * self.info.kv_bytes_per_token
        sizes = [group.bytes_per_token * self._tables.block_size for group in self.info.kv_groups]
        return states + sum(count * size for count, size in zip(used, sizes, strict=False))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let slot ``target`` hold positions [0, length) of slot ``source``, sharing its blocks."""
        gone = int(self._dropped[source])
        held = self._tables.lengths[source] + gone
        if not self._settled[source] <= length <= held:
            raise ProviderRuntimeError(f"slot {source} holds {held} tokens, not {length}")
        if self._states is not None:
            self._states.share(source, target, self._replays.state_before(source, length))
            self._replays.share(source, target, length)
        if self._encoder is not None:
            self._encoder.share(source, target)
        self._tables.share(source, target, length - gone)
        self._dropped[target], self._settled[target] = gone, self._settled[source]

    def trim(self, slot: int, length: int) -> None:
        """Free blocks behind the windows, group by group; see ``Runner``."""
        if not self._dropped[slot]:  # rows of an evicted slot are no positions
            for group, layers in enumerate(self.info.kv_groups):
                if freed := layers.freed(length):
                    self._tables.free_first(group, slot, freed)
        self._settled[slot] = max(length, int(self._settled[slot]))

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        """Evict KV of tokens before ``length``; see ``Runner``."""
        session, held = self._opened(), length - int(self._dropped[slot])
        rows = self._tables.lengths[slot]
        if not eviction.sinks + eviction.recent <= eviction.kept <= held <= rows:
            raise ProviderRuntimeError(
                f"slot {slot} holds {rows} tokens, so {eviction} of {held} is impossible"
            )
        # What a window has freed is not among the rows that its layers attend to: any block will do.
        blocks = [[max(0, block) for block in table] for table in self._tables.replace(slot, eviction.kept)]
        session.evict_kv(blocks, self._tables.of(slot), held, eviction)
        self._dropped[slot] = length - eviction.kept
        self._settled[slot] = length

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; see ``Runner``."""
        if self._loras is None:
            raise ProviderRuntimeError("the graph was lowered without LoRA adapters")
        self._loras.write(place, matrices)

    def release(self, slot: int) -> None:
        """Free the slot's blocks and states. Its content is lost."""
        if self._states is not None:
            self._states.release(slot)
            self._replays.release(slot)
        if self._encoder is not None:
            self._encoder.release(slot)
        self._tables.truncate(slot, 0)
        self._dropped[slot] = self._settled[slot] = 0

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the blocks of positions [start, start + length); see ``Runner``."""
        begin, held = self._row(slot, start), self._tables.lengths[slot]
        if begin is None or begin + length > held:
            raise ProviderRuntimeError(
                f"slot {slot} holds {held} tokens; positions [{start}, {start + length}) cannot be read"
            )
        return self._opened().read_blocks(self._blocks(slot, begin, length), self._span(begin, length))

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write KV of positions [start, start + length); see ``Runner``."""
        begin, held = self._row(slot, start), self._tables.lengths[slot]
        if begin is None or begin > held or start + length > self.info.context_length:
            raise ProviderRuntimeError(f"positions [{start}, {start + length}) do not continue slot {slot}")
        session = self._opened()
        self._tables.truncate(slot, begin)
        for copy in self._tables.reserve([(slot, begin + length)]):
            session.copy_block(*copy)
        session.write_blocks(self._blocks(slot, begin, length), self._span(begin, length), parts)
        self._tables.lengths[slot] = begin + length

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the recurrent state after ``length`` tokens; see ``Runner``."""
        return [*self._state_memory().read(slot, length)]

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the recurrent state after ``length`` tokens; see ``Runner``."""
        states = self._state_memory()
        if length != (held := self._tables.lengths[slot]):
            raise ProviderRuntimeError(f"slot {slot} holds {held} tokens, not {length}")
        self._replays.release(slot)  # its tokens are those of another text
        states.write(slot, length, parts)

    def check_integrity(self) -> None:
        """Check the block tables; see ``BlockPool.check_integrity``."""
        self._tables.check_integrity()
        if self._states is not None:
            self._states.check_integrity()
        if self._encoder is not None:
            self._encoder.check_integrity()

    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""
        with no_capture():  # a device frees the session
            self.session = self._ahead = None

    def _state_memory(self) -> StateMemory:
        if self._states is None:
            raise ProviderRuntimeError("the model has no recurrent states")
        return self._states

    def _opened(self) -> PagedSession:
        if self.session is None:
            raise ProviderRuntimeError("the runner is closed")
        return self.session

    def _check(self, rows: Sequence[Row]) -> tuple[PagedSession, Sequence[Row], list[Row]]:
        """Check the rows; return the session, the rows, and the rows with starts in the cache.

        Raises:
            ProviderRuntimeError: a row needs KV that its slot lacks; nothing was changed.
        """
        session = self._opened()
        check_rows(rows, self.info, self._dropped + self._tables.lengths, self._hidden_size)
        if self._states is not None:
            self._states.check(rows)
        if self._encoder is not None:
            self._encoder.check(rows)
        return session, rows, rows_in_cache(rows, self._dropped, self._settled)

    def _row(self, slot: int, start: int) -> int | None:
        """Return the cache row of position ``start``; None if it is missing or no place to begin at."""
        row = start - int(self._dropped[slot])
        grain = min(_GRAIN, self._tables.block_size)
        return None if start < self._settled[slot] or row % grain else row

    def _span(self, start: int, length: int) -> Span:
        return Span(start % self._tables.block_size, length)

    def _blocks(self, slot: int, start: int, length: int) -> list[list[int]]:
        size = self._tables.block_size
        return [table[start // size : -(-(start + length) // size)] for table in self._tables.of(slot)]

    def _batch(self, rows: Sequence[Row]) -> PagedBatch:
        """Return rows with starts in the cache as one flat batch."""
        dropped = self._dropped
        tokens, firsts, starts, begins = [], [], [], [0]
        chosen: list[int] = []  # places of the wanted logits
        loras: list[int | None] = []
        states: list[npt.NDArray[np.float32]] = []
        tables: list[list[list[int]]] = [[] for _ in self._tables.tables]
        asked = False
        for row in rows:
            begin, count = begins[-1], len(row.tokens)
            tokens.append(row.tokens)
            firsts.append(row.start + int(dropped[row.slot]) - begin)
            starts.append(row.start)
            begins.append(begin + count)
            chosen += range(begin + count - row.num_logits, begin + count)
            for table, slots in zip(tables, self._tables.tables, strict=True):
                table.append(slots[row.slot])
            if self._loras is not None:
                loras += [row.lora] * count
            if row.hidden_states is not None:
                states.append(row.hidden_states)
            asked = asked or row.last_hidden_states is not None
        lengths, total = np.diff(begins), begins[-1]
        width, axes = self.info.image_width, self.info.rope_axes
        texts = [first + begin for first, begin in zip(firsts, begins, strict=False)]
        seen, seen_rows = image_inputs(rows, width) if width else (None, None)
        return PagedBatch(
            input_ids=np.concatenate(tokens).astype(np.int64),
            position_ids=np.repeat(np.array(firsts, np.int64), lengths) + np.arange(total),
            # A graph must compute at least one logit row; an unwanted one is ignored.
            logits_positions=np.array(chosen or [0], np.int64),
            past_lens=np.array(starts, np.int32),
            begins=np.array(begins, np.int32),
            tables=tables,
            hidden_states=np.concatenate(states) if states else None,
            last_hidden_states=np.empty((total, self.info.hidden_width), np.float32) if asked else None,
            lora=None if self._loras is None else self._loras.inputs(loras),
            image_states=seen,
            image_rows=seen_rows,
            image_ahead=image_ahead(rows) if self.info.image_ahead else None,
            rope_positions=rope_positions(rows, texts, axes) if axes else None,
        )


@dataclass(slots=True)
class _Step:
    """A step that was submitted: the step before, and the place of each row's last wanted logits."""

    flight: PagedFlight
    before: _Step | None
    places: list[int]
    drawn: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # after its end
    failed: bool = False


def _with_sources(batch: PagedBatch, rows: Sequence[Row], before: _Step) -> PagedBatch:
    """Return a batch that runs tokens drawn by the step before, where rows say so."""
    ids, sources = batch.input_ids.copy(), np.zeros_like(batch.input_ids)
    for row, begin in zip(rows, batch.begins.tolist(), strict=False):
        if row.source is not None:
            ids[begin], sources[begin] = -1, before.places[row.source]
    return dataclasses.replace(batch, input_ids=ids, sources=sources)


def _runs(rows: Sequence[Row]) -> Iterator[dict[int, Row]]:
    """Yield runs of pieces of the rows, by index of the row; pieces end where a state is kept."""
    cuts = [
        [row.start, *sorted(n for n in row.checkpoints if n > row.start), row.start + len(row.tokens)]
        for row in rows
    ]
    for number in range(max(map(len, cuts)) - 1):
        yield {
            index: _piece(row, *ends[number : number + 2])
            for index, (row, ends) in enumerate(zip(rows, cuts, strict=True))
            if number + 1 < len(ends)
        }


def _piece(row: Row, first: int, last: int) -> Row:
    """Return the part of a row with positions [first, last)."""
    part = slice(first - row.start, last - row.start)
    logits_from = row.start + len(row.tokens) - row.num_logits
    return dataclasses.replace(
        row,
        tokens=row.tokens[part],
        start=first,
        num_logits=max(0, last - max(first, logits_from)),
        hidden_states=None if row.hidden_states is None else row.hidden_states[part],
        image_rows=None if row.image_rows is None else row.image_rows[part],
        image_ahead=None if row.image_ahead is None else row.image_ahead[part],
        rope_positions=_positions(row, part),
        last_hidden_states=None if row.last_hidden_states is None else row.last_hidden_states[part],
    )


def _positions(row: Row, part: slice) -> npt.NDArray[np.int64] | None:
    given = row.rope_positions
    return None if given is None else rope_positions([row], [row.start], len(given))[:, part]


def _fill_hidden_states(rows: Sequence[Row], batch: PagedBatch, states: npt.NDArray[np.float32]) -> None:
    """Copy hidden states to the rows that asked for them."""
    for row, begin in zip(rows, batch.begins.tolist(), strict=False):
        if row.last_hidden_states is not None:
            row.last_hidden_states[:] = states[begin : begin + len(row.tokens)]
