"""Sessions of paged graphs on a device: KV in blocks, and runs that are captured in a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    DRAW,
    DRAW_COLUMNS,
    DRAWN,
    DRAWN_BEFORE,
    ENCODER_BEGINS,
    ENCODER_LENGTHS,
    ENCODER_STATES,
    ENCODER_TABLE,
    HIDDEN_STATES,
    IMAGE_AHEAD,
    IMAGE_ROWS,
    IMAGE_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LOGITS_POSITIONS,
    LOGSUMEXP,
    LORA_MASK,
    POSITION_IDS,
    ROPE_POSITIONS,
    TOKEN_SOURCES,
    TOP_LOGITS,
    TOP_TOKEN_IDS,
)
from ...errors import GraphError, ProviderRuntimeError, ProviderUnavailableError
from ...graph_opt.lower.paged_kv import BEGINS, BOUNDS, PAST, STATE_PLACES, TABLE
from ...records import dataclass
from ..base import BestLogits, KVEviction
from ..draws import controls_of
from ..kv.block_pool import FREED
from ..kv.decoder_graph import DecoderGraph, read_graph
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch, Span
from . import ort
from .device_block import DeviceBlock, DeviceStream, Shapes, shapes_of
from .device_memory import DeviceSlots, run_options
from .paged_forms import Form, Forms, StepSizes
from .slot_memory import SlotBinding, shared_value

# The inputs of runs that can be captured.
_FIXED = frozenset({INPUT_IDS, POSITION_IDS, LOGITS_POSITIONS, BEGINS, PAST, TABLE, BOUNDS, HIDDEN_STATES})
_FIXED |= {DRAW, DRAWN_BEFORE, TOKEN_SOURCES, IMAGE_STATES, IMAGE_ROWS, ROPE_POSITIONS, LORA_MASK}


def read_paged_graph(session: Any, source: str) -> DecoderGraph:
    """Return the interface of a graph with blocks [positions, kv_heads, head_size] of any size.

    Raises:
        GraphError: the graph has no paged cache, or layers with different numbers of KV heads.
    """
    graph = read_graph(session, source, heads_axis=2)
    if not graph.caches or TABLE not in graph.inputs:
        raise GraphError(f"{source} has no paged KV cache; lower it with provider.passes()")
    heads = {spec.heads for spec in graph.caches.values()}
    if len(heads) > 1:
        raise GraphError(f"{source} has layers with {sorted(heads)} KV heads; blocks need equal numbers")
    return graph


def result_bytes(graph: DecoderGraph, rows: int) -> int:
    """Return the bytes of all logits and drawn tokens that a session of a graph holds on the device."""
    copies = 3 if DRAW in graph.inputs else 1  # a step, and two that are read while others write
    return rows * (4 * copies * graph.vocab_size + 8)


@dataclass(slots=True)
class _Run:
    """A binding, and the device's memory of its inputs, its largest logits, all logits and drawn tokens."""

    bound: SlotBinding
    inputs: DeviceBlock
    best: DeviceBlock
    logits: Any  # an ``OrtValue`` that begins with [wanted, 1, vocab_size] in float32
    drawn: Any  # an ``OrtValue`` that begins with [wanted] in int64


class _Pinned:
    """Two pieces of memory on the host by name, in turns, from which and to which copies need not wait."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream, self.turn = stream, 0
        self._pieces: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}

    def of(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """Return the piece of this turn with at least so many bytes."""
        key = (name, self.turn)
        if key not in self._pieces or len(self._pieces[key]) < size:
            self._pieces[key] = self._stream.host(size)
        return self._pieces[key]


class _Flight:
    """A step that was given to the device; see ``PagedFlight``."""

    def __init__(self, results: Callable[[], Logits | list[Logits | BestLogits]], drawn: Any) -> None:
        self._results, self.drawn = results, drawn

    def finish(self) -> Logits | list[Logits | BestLogits]:
        """Return the results when the device has computed the step."""
        return self._results()


class OrtPagedSession:
    """A ``PagedSession`` on an execution provider, and an ``AheadSession`` if its graph draws tokens.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of a paged graph, on ``stream``.
        graph: its interface.
        memory: its caches; each block is a slot of this memory, and the last one is for padding.
        block_size: positions of a block.
        stream: the work of the session and of what copies blocks.
        forms: sizes of runs to capture; None captures none.
        rows: maximum rows of a step, and of its form.
        most_forms: maximum number of captured runs, which keep memory of the device until the session ends.
        adapters: matrices of all places for LoRA adapters, by input; empty if the graph takes none.
    """

    def __init__(
        self,
        session: Any,
        graph: DecoderGraph,
        memory: DeviceSlots,
        stream: DeviceStream,
        forms: Forms | None,
        *,
        block_size: int,
        rows: int,
        most_forms: int = 256,
        adapters: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self.session, self._graph, self._memory, self._stream = session, graph, memory, stream
        self._pinned, self._side, self._block_size = _Pinned(stream), memory.stream(), block_size
        self._matrices = {
            name: (array, memory.bytes_of(array.nbytes)) for name, array in (adapters or {}).items()
        }
        self._adapters: object = None  # of which the device has the matrices
        capturable = graph.inputs - graph.caches.keys() - self._matrices.keys() <= _FIXED
        self._forms, self._pads = forms if capturable else None, True
        self._scratch = memory.slots - 1
        self.captured: dict[Form, _Run] = {}
        self._left = most_forms  # how many more may be captured
        self._loose: Any = None  # a binding with the caches, for runs that are not captured
        self._rows = rows
        self._logits, self._drawn = self._logits_of(self._rows), memory.bytes_of(8 * self._rows)
        # With a step ahead, logits of a step are read while the next one writes its own.
        self._draws = DRAW in graph.inputs
        self._kept = [self._logits_of(self._rows) for _ in range(2)] if self._draws else []

    def run(self, batch: PagedBatch) -> Logits | list[Logits | BestLogits]:
        return self.begin(batch).finish()

    def begin(self, batch: PagedBatch) -> _Flight:
        """See ``AheadSession``; without drawn tokens, no step may be begun while another is not finished."""
        return self._begin(batch, self._form(batch))

    def _begin(self, batch: PagedBatch, form: Form | None) -> _Flight:
        count = len(batch.logits_positions)
        with self._failures(batch, form):
            self._memory.enter()
            self._pinned.turn ^= 1
            self._take_adapters(batch)
            run = self._exact(batch) if form is None else self._padded(batch, form)
            run.best.use(self._pinned.of("best", run.best.size))
            run.best.download()
            logits, drawn = run.logits, self._pinned.of("drawn", 8 * count)[: 8 * count].view(np.int64)
            if self._draws:
                self._stream.copy(drawn.ctypes.data, run.drawn.data_ptr(), drawn.nbytes)
            if self._kept and run.logits is self._logits:
                logits = self._kept[self._pinned.turn]
                size = 4 * count * self._graph.vocab_size
                self._stream.copy(logits.data_ptr(), run.logits.data_ptr(), size)
            done, best = self._stream.mark(), run.best.arrays

        def results() -> Logits | list[Logits | BestLogits]:
            with self._failures(batch, form):
                self._memory.enter()
                done()
                return self._results(batch, run, logits, best)

        return _Flight(results, drawn)

    def _take_adapters(self, batch: PagedBatch) -> None:
        """Copy the matrices of adapters to the device, in front of the run, if one was loaded."""
        state = None if batch.lora is None else batch.lora.state
        if not self._matrices or (self._adapters is not None and state in (None, self._adapters)):
            return
        for array, value in self._matrices.values():
            self._stream.copy(value.data_ptr(), array.ctypes.data, array.nbytes)
        self._adapters = state or ()

    @contextmanager
    def _failures(self, batch: PagedBatch, form: Form | None) -> Iterator[None]:
        rows = len(batch.past_lens)
        try:
            yield
        except ort.runtime_errors() as error:
            self._forget(form)
            raise ort.run_error(rows, error) from error
        except (ProviderUnavailableError, ProviderRuntimeError) as error:
            self._forget(form)
            raise ort.run_error(rows, error) from error

    def capture_decoding(self) -> None:
        """Capture the steps of one token a row now, so that none waits for it later.

        Raises:
            ProviderRuntimeError: a run failed.
        """
        width, zero = self._graph.hidden_size, np.zeros(1, np.int32)
        batch = PagedBatch(
            input_ids=zero.astype(np.int64),
            position_ids=zero.astype(np.int64),
            logits_positions=zero.astype(np.int64),
            past_lens=zero,
            begins=np.array([0, 1], np.int32),
            tables=[[[self._scratch]]],
            hidden_states=None if width is None else np.zeros((1, width), np.float32),
        )
        for form in self._forms.smallest() if self._forms is not None and self._pads else []:
            self._begin(batch, form).finish()

    @property
    def pads(self) -> bool:
        """Whether steps are padded to forms and captured."""
        return self._forms is not None and self._pads

    def pad(self, pads: bool) -> None:
        """Choose whether steps are padded to forms and captured."""
        self._pads = pads

    def _form(self, batch: PagedBatch) -> Form | None:
        """Return the form to pad a batch to, None for a run of its own size."""
        if self._forms is None or not self._pads or batch.last_hidden_states is not None:
            return None
        if len(batch.logits_positions) > max(1, len(batch.past_lens)):
            return None
        if batch.image_rows is not None and (batch.image_rows >= 0).any():
            return None
        form = self._forms.choose(
            StepSizes(
                tokens=int(batch.begins[-1]),
                rows=len(batch.past_lens),
                width=max(map(len, batch.tables[0])),
                query=int(np.diff(batch.begins).max()),
                longest=batch.max_context,
            )
        )
        return form if form in self.captured or self._left > 0 else None

    def _padded(self, batch: PagedBatch, form: Form) -> _Run:
        """Begin a batch in a captured form."""
        if form not in self.captured:
            self.captured[form] = self._bind(form)
            self._left -= 1
        run = self.captured[form]
        run.inputs.use(self._pinned.of("inputs", run.inputs.size))
        self._fill(batch, form, run.inputs.arrays)
        run.inputs.upload()
        run.bound.run(self.session)
        return run

    def _fill(self, batch: PagedBatch, form: Form, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a batch and the padding to the inputs of a form."""
        rows, tokens = len(batch.past_lens), int(batch.begins[-1])
        begins, table = arrays[BEGINS], arrays[TABLE]
        begins[: rows + 1] = batch.begins
        padding = np.arange(1, form.rows - rows + 1) * form.padding
        begins[rows + 1 :] = np.minimum(tokens + padding, form.tokens)
        arrays[PAST][:rows], arrays[PAST][rows:] = batch.past_lens, 0
        table[...] = self._scratch
        for row, blocks in enumerate(batch.tables[0]):
            table[row, : len(blocks)] = blocks
        np.maximum(table, 0, out=table)  # kernels skip what is freed, but check every number
        wanted = len(batch.logits_positions)
        arrays[LOGITS_POSITIONS][:wanted], arrays[LOGITS_POSITIONS][wanted:] = batch.logits_positions, 0
        flat = {
            INPUT_IDS: batch.input_ids,
            POSITION_IDS: batch.position_ids,
            HIDDEN_STATES: batch.hidden_states,
            TOKEN_SOURCES: batch.sources,
        }
        for name, values in flat.items():
            if name in arrays:
                arrays[name][:tokens, 0], arrays[name][tokens:] = 0 if values is None else values, 0
        if IMAGE_ROWS in arrays:
            arrays[IMAGE_STATES][...], arrays[IMAGE_ROWS][...] = 0, -1
        if ROPE_POSITIONS in arrays:
            arrays[ROPE_POSITIONS][...] = 0
            if batch.rope_positions is not None:
                arrays[ROPE_POSITIONS][:, :tokens, 0] = batch.rope_positions
        if LORA_MASK in arrays:
            arrays[LORA_MASK][...] = False
            if batch.lora is not None:
                arrays[LORA_MASK][:tokens] = batch.lora.mask
        if self._draws:
            arrays[DRAW][...] = controls_of(batch.draws, form.rows)

    def _bind(self, form: Form) -> _Run:
        """Return a run of a form, which is captured when it runs first."""
        int32, int64, float32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
        shapes: Shapes = {
            INPUT_IDS: ((form.tokens, 1), int64),
            POSITION_IDS: ((form.tokens, 1), int64),
            HIDDEN_STATES: ((form.tokens, 1, self._graph.hidden_size or 0), float32),
            TOKEN_SOURCES: ((form.tokens, 1), int64),
            IMAGE_STATES: ((1, self._graph.image_width), float32),
            IMAGE_ROWS: ((form.tokens, 1), int64),
            ROPE_POSITIONS: ((self._graph.rope_axes, form.tokens, 1), int64),
            LOGITS_POSITIONS: ((form.rows,), int64),
            LORA_MASK: ((form.tokens, 1, self._places), np.dtype(np.bool_)),
            DRAW: ((form.rows, len(DRAW_COLUMNS)), float32),
            BEGINS: ((form.rows + 1,), int32),
            PAST: ((form.rows,), int32),
            TABLE: ((form.rows, form.width), int32),
        }
        bounds = np.array([form.query, form.reach, form.longest], np.int32)
        shapes = {name: described for name, described in shapes.items() if name in self._graph.inputs}
        run = self._bound(self._cached(), shapes, bounds, form.rows)
        run.bound = self._memory.captured_run(run.bound.binding, waits=False)
        return run

    def _exact(self, batch: PagedBatch) -> _Run:
        """Begin a batch in its own size, not captured."""
        feeds, wanted, states = paged_feeds(batch, self._graph.inputs), len(batch.logits_positions), None
        bounds = feeds.pop(BOUNDS)
        if batch.last_hidden_states is None:
            self._loose = binding = self._loose or self._cached()
        else:
            states, binding = batch.last_hidden_states, self._cached()
        if self._draws:
            feeds[DRAW] = controls_of(batch.draws, wanted)
            sources = np.zeros_like(batch.input_ids) if batch.sources is None else batch.sources
            feeds[TOKEN_SOURCES] = sources[:, None]
        run = self._bound(binding, shapes_of(feeds), bounds, wanted)
        run.inputs.use(self._pinned.of("inputs", run.inputs.size))
        if states is not None:
            binding.bind_output(LAST_HIDDEN_STATE, "cpu")
            run.bound.options = run_options(None)
        for name, array in feeds.items():
            run.inputs.arrays[name][...] = array
        run.inputs.upload()
        run.bound.run(self.session)
        if states is not None:
            states[...] = binding.get_outputs()[-1].numpy()[:, 0]
        return run

    def _cached(self) -> Any:
        """Return a binding with the caches and the matrices of adapters."""
        binding, device = self.session.io_binding(), self._memory.device
        self._memory.bind_caches(binding, 0, self._memory.slots)
        for name, (array, value) in self._matrices.items():
            place = device.name, device.index, np.float32, list(array.shape), value.data_ptr()
            binding.bind_input(name, *place)
        return binding

    @property
    def _places(self) -> int:
        """The rows of the matrices of adapters."""
        return max((len(array) for array, _ in self._matrices.values()), default=0)

    def _bound(self, binding: Any, shapes: Shapes, bounds: npt.NDArray[np.int32], wanted: int) -> _Run:
        """Bind inputs and results; return a run that is not captured, and does not wait for the device."""
        device, fits = self._memory.device, wanted <= self._rows
        inputs = DeviceBlock(shapes, self._memory.bytes_of, self._stream)
        inputs.bind_inputs(binding, device.name, device.index)
        binding.bind_ortvalue_input(BOUNDS, shared_value(bounds))
        logits = self._logits if fits else self._logits_of(wanted)
        shape = [wanted, 1, self._graph.vocab_size]
        binding.bind_output(LOGITS, device.name, device.index, np.float32, shape, logits.data_ptr())
        best = DeviceBlock(self._best_shapes(wanted), self._memory.bytes_of, self._stream)
        best.bind_outputs(binding, device.name, device.index)
        drawn = self._drawn if fits else self._memory.bytes_of(8 * wanted)
        if self._draws:
            place = device.name, device.index, np.int64
            binding.bind_input(DRAWN_BEFORE, *place, [self._rows], self._drawn.data_ptr())
            binding.bind_output(DRAWN, *place, [wanted], drawn.data_ptr())
        return _Run(SlotBinding(binding, options=run_options(None, waits=False)), inputs, best, logits, drawn)

    def _best_shapes(self, wanted: int) -> Shapes:
        count = self._graph.top_logits
        if not count:
            return {}
        return {
            TOP_LOGITS: ((wanted, 1, count), np.dtype(np.float32)),
            TOP_TOKEN_IDS: ((wanted, 1, count), np.dtype(np.int64)),
            LOGSUMEXP: ((wanted, 1), np.dtype(np.float32)),
        }

    def _logits_of(self, rows: int) -> Any:
        return self._memory.bytes_of(4 * rows * self._graph.vocab_size)

    def _results(
        self, batch: PagedBatch, run: _Run, logits: Any, best: Mapping[str, npt.NDArray[Any]]
    ) -> Logits | list[Logits | BestLogits]:
        """Return the results of a run that the device has computed; ``logits`` are there."""
        count, size = len(batch.logits_positions), self._graph.vocab_size
        if not any(batch.late):
            return self._read(logits, 0, count)
        # The second next step overwrites the originals.
        ids, largest = best[TOP_TOKEN_IDS][:count, 0].copy(), best[TOP_LOGITS][:count, 0].copy()
        totals = best[LOGSUMEXP][:count, 0].tolist()
        return [
            BestLogits(ids[row], largest[row], totals[row], size, partial(self._whole, logits, row))
            if late
            else self._read(logits, row, 1)[0]
            for row, late in enumerate(batch.late)
        ]

    def _whole(self, logits: Any, row: int) -> Logits:
        try:
            found: Logits = self._read(logits, row, 1)[0]
        except ProviderUnavailableError as error:
            raise ProviderRuntimeError(f"logits could not be downloaded: {error}") from error
        return found

    def _read(self, logits: Any, first: int, count: int) -> Logits:
        """Download all logits of some wanted rows, beside a step that runs."""
        result = np.empty((count, self._graph.vocab_size), np.float32)
        place = logits.data_ptr() + first * result.shape[1] * 4
        self._side.copy(result.ctypes.data, place, result.nbytes)
        self._side.mark()()
        return result

    def _forget(self, form: Form | None) -> None:
        """Forget a binding that failed half-way: it would end the process when it is bound again."""
        self._loose = None
        if form is not None:
            self.captured.pop(form, None)

    def copy_block(self, group: int, source: int, target: int) -> None:
        self._memory.copy_prefix(source, target, self._memory.length)

    @property
    def layout(self) -> str:
        """What ``read_blocks`` returns, for ``RunnerInfo.kv_layout``: positions, of any blocks."""
        caches = self._graph.caches.items()
        return f"positions: {'; '.join(f'{name} {s.dtype} {s.heads}x{s.width}' for name, s in caches)}"

    def read_blocks(self, blocks: GroupBlocks, span: Span) -> list[npt.NDArray[Any]]:
        """Return [positions, bytes] of each cache: views of memory that the next call uses again."""
        with self._moves("read"):
            parts = self._staged(span)
            for name, part in parts.items():
                for rows, place in self._pieces(name, blocks[0], span):
                    self._stream.copy(part[rows].ctypes.data, place, part[rows].nbytes)
            self._stream.mark()()
        return list(parts.values())

    def write_blocks(self, blocks: GroupBlocks, span: Span, parts: Sequence[npt.NDArray[Any]]) -> None:
        with self._moves("written"):
            staged = self._staged(span)
            if [(one.shape, one.dtype) for one in parts] != [
                (one.shape, one.dtype) for one in staged.values()
            ]:
                raise ProviderRuntimeError(f"the KV has another layout than {self.layout}")
            for (name, part), content in zip(staged.items(), parts, strict=True):
                part[...] = content
                for rows, place in self._pieces(name, blocks[0], span):
                    self._stream.copy(place, part[rows].ctypes.data, part[rows].nbytes)
            self._stream.mark()()

    @contextmanager
    def _moves(self, what: str) -> Iterator[None]:
        try:
            self._memory.enter()
            yield
        except ProviderUnavailableError as error:
            raise ProviderRuntimeError(f"KV could not be {what}: {error}") from error

    def _staged(self, span: Span) -> dict[str, npt.NDArray[np.uint8]]:
        """Return pinned memory [positions, bytes] for each cache."""
        widths = {name: spec.bytes_per_token for name, spec in self._graph.caches.items()}
        host, used = self._pinned.of("kv", span.length * sum(widths.values())), 0
        parts = {}
        for name, width in widths.items():
            parts[name] = host[used : used + span.length * width].reshape(span.length, width)
            used += parts[name].nbytes
        return parts

    def _pieces(self, name: str, blocks: Sequence[int], span: Span) -> Iterator[tuple[slice, int]]:
        """Yield positions of a span that lie side by side in a cache, and the address of the first."""
        begin, first = 0, span.first
        for block in blocks:
            count = min(span.length - begin, self._block_size - first)
            offset = first * self._graph.caches[name].bytes_per_token
            yield slice(begin, begin + count), self._memory.address(name, block) + offset
            begin, first = begin + count, 0

    def evict_kv(self, blocks: GroupBlocks, targets: GroupBlocks, held: int, eviction: KVEviction) -> None:
        """See ``PagedSession``. Not supported: the operator rotates keys by their row in the cache."""
        raise ProviderRuntimeError("KV on this device cannot be evicted in parts")


def paged_feeds(
    batch: PagedBatch, inputs: Collection[str], tables: Sequence[str] = (TABLE,), width_step: int = 1
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a run, except the caches and the matrices of adapters, by name.

    Args:
        batch: the rows.
        inputs: names of the graph's inputs; others are left out.
        tables: name of the block table of each group of layers.
        width_step: the columns of the block tables are a multiple of it.
    """
    feeds: dict[str, npt.NDArray[Any]] = {
        INPUT_IDS: batch.input_ids[:, None],
        POSITION_IDS: batch.position_ids[:, None],
        LOGITS_POSITIONS: batch.logits_positions,
        BEGINS: batch.begins,
        PAST: batch.past_lens,
    }
    for name, rows in zip(tables, batch.tables, strict=True):
        widest, freed = 0, False
        for blocks in rows:
            widest, freed = max(widest, len(blocks)), freed or blocks[0] == FREED
        feeds[name] = np.zeros((len(rows), -(-widest // width_step) * width_step), np.int32)
        for row, blocks in enumerate(rows):
            feeds[name][row, : len(blocks)] = blocks
        if freed:
            np.maximum(feeds[name], 0, out=feeds[name])  # kernels skip what is freed, but check every number
    if batch.state_places is not None:
        feeds[STATE_PLACES] = batch.state_places
    if BOUNDS in inputs:
        feeds[BOUNDS] = np.array(
            [np.diff(batch.begins).max(), batch.max_context, batch.max_context], np.int32
        )
    if batch.lora is not None:
        feeds[LORA_MASK] = batch.lora.mask
    if batch.hidden_states is not None:
        feeds[HIDDEN_STATES] = np.ascontiguousarray(batch.hidden_states[:, None])
    if batch.encoder is not None:
        feeds |= {
            ENCODER_STATES: batch.encoder.states[:, None],
            ENCODER_BEGINS: batch.encoder.begins,
            ENCODER_LENGTHS: batch.encoder.lengths,
            ENCODER_TABLE: batch.encoder.table,
        }
    if batch.image_states is not None and batch.image_rows is not None:
        feeds |= {IMAGE_STATES: batch.image_states, IMAGE_ROWS: batch.image_rows[:, None]}
    if batch.image_ahead is not None:
        feeds[IMAGE_AHEAD] = batch.image_ahead[:, None]
    if batch.rope_positions is not None:
        feeds[ROPE_POSITIONS] = batch.rope_positions[:, :, None]
    return {name: array for name, array in feeds.items() if name in inputs}
