"""Sessions of paged graphs on a device: KV in blocks, and runs that are captured in a few sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
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
    TOP_LOGITS,
    TOP_TOKEN_IDS,
)
from ...errors import GraphError, ProviderRuntimeError, ProviderUnavailableError
from ...graph_opt.lower.paged_kv import BEGINS, BOUNDS, PAST, STATE_PLACES, TABLE
from ..base import BestLogits, KVEviction
from ..kv.block_pool import FREED
from ..kv.decoder_graph import DecoderGraph, read_graph
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch
from . import ort
from .device_block import DeviceBlock, Shapes, shapes_of
from .device_memory import DeviceMemory, run_options
from .paged_forms import Form, Forms, Step
from .slot_memory import BoundRun, shared_value

# The inputs of runs that can be captured.
_FIXED = frozenset({INPUT_IDS, POSITION_IDS, LOGITS_POSITIONS, BEGINS, PAST, TABLE, BOUNDS, HIDDEN_STATES})


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


@dataclass(slots=True)
class _Run:
    """A binding, and the device's memory of its inputs, its largest logits and all logits."""

    bound: BoundRun
    inputs: DeviceBlock
    best: DeviceBlock
    logits: Any  # an ``OrtValue`` that begins with [wanted, 1, vocab_size] in float32


class OrtPagedSession:
    """A ``PagedSession`` on an execution provider.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of a paged graph.
        graph: its interface.
        memory: its caches; each block is a slot of this memory, and the last one is for padding.
        forms: sizes of runs to capture; None captures none.
        most_forms: maximum number of captured runs, which keep memory of the device until the session ends.
    """

    def __init__(
        self,
        session: Any,
        graph: DecoderGraph,
        memory: DeviceMemory,
        forms: Forms | None,
        most_forms: int = 256,
    ) -> None:
        self._session, self._graph, self._memory = session, graph, memory
        capturable = graph.inputs - graph.caches.keys() <= _FIXED
        self._forms, self._pads = forms if capturable else None, True
        self._scratch = memory.slots - 1
        self._captured: dict[Form, _Run] = {}
        self._left = most_forms  # how many more may be captured
        self._loose: Any = None  # a binding with the caches, for runs that are not captured
        rows = 1 if self._forms is None else self._forms.most_rows
        self._logits, self._rows = self._logits_of(rows), rows

    def run(self, batch: PagedBatch) -> Logits | list[Logits | BestLogits]:
        """See ``PagedSession``."""
        return self._run(batch, self._form(batch))

    def _run(self, batch: PagedBatch, form: Form | None) -> Logits | list[Logits | BestLogits]:
        rows = len(batch.past_lens)
        try:
            self._memory.enter()
            run = self._exact(batch) if form is None else self._padded(batch, form)
            return self._results(batch, run)
        except ort.runtime_errors() as error:
            self._forget(form)
            raise ProviderRuntimeError(f"a run of {rows} rows failed: {ort.one_line(error)}") from error
        except (ProviderUnavailableError, ProviderRuntimeError) as error:
            self._forget(form)
            raise ProviderRuntimeError(f"a run of {rows} rows failed: {error}") from error

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
            self._run(batch, form)

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
        form = self._forms.choose(
            Step(
                tokens=int(batch.begins[-1]),
                rows=len(batch.past_lens),
                width=max(map(len, batch.tables[0])),
                query=int(np.diff(batch.begins).max()),
                longest=batch.max_context,
            )
        )
        return form if form in self._captured or self._left > 0 else None

    def _padded(self, batch: PagedBatch, form: Form) -> _Run:
        """Run a batch in a captured form."""
        if form not in self._captured:
            self._captured[form] = self._bind(form)
            self._left -= 1
        run = self._captured[form]
        self._fill(batch, form, run.inputs.arrays)
        run.inputs.upload()
        run.bound.run(self._session)
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
        wanted = batch.logits_positions
        arrays[LOGITS_POSITIONS][: len(wanted)], arrays[LOGITS_POSITIONS][len(wanted) :] = wanted, 0
        flat = {
            INPUT_IDS: batch.input_ids,
            POSITION_IDS: batch.position_ids,
            HIDDEN_STATES: batch.hidden_states,
        }
        for name, values in flat.items():
            if name in arrays and values is not None:
                arrays[name][:tokens, 0], arrays[name][tokens:] = values, 0

    def _bind(self, form: Form) -> _Run:
        """Return a run of a form, which is captured when it runs first."""
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        shapes: Shapes = {
            INPUT_IDS: ((form.tokens, 1), int64),
            POSITION_IDS: ((form.tokens, 1), int64),
            HIDDEN_STATES: ((form.tokens, 1, self._graph.hidden_size or 0), np.dtype(np.float32)),
            LOGITS_POSITIONS: ((form.rows,), int64),
            BEGINS: ((form.rows + 1,), int32),
            PAST: ((form.rows,), int32),
            TABLE: ((form.rows, form.width), int32),
        }
        bounds = np.array([form.query, form.reach, form.longest], np.int32)
        shapes = {name: described for name, described in shapes.items() if name in self._graph.inputs}
        binding = self._cached()
        inputs, best = self._bound(binding, shapes, bounds, self._logits, form.rows)
        return _Run(self._memory.captured_run(binding), inputs, best, self._logits)

    def _exact(self, batch: PagedBatch) -> _Run:
        """Run a batch in its own size, not captured."""
        feeds, wanted, states = paged_feeds(batch, self._graph.inputs), len(batch.logits_positions), None
        bounds = feeds.pop(BOUNDS)
        logits = self._logits if wanted <= self._rows else self._logits_of(wanted)
        if batch.last_hidden_states is None:
            self._loose = binding = self._loose or self._cached()
        else:
            states, binding = batch.last_hidden_states, self._cached()
        inputs, best = self._bound(binding, shapes_of(feeds), bounds, logits, wanted)
        if states is not None:
            binding.bind_output(LAST_HIDDEN_STATE, "cpu")
        for name, array in feeds.items():
            inputs.arrays[name][...] = array
        inputs.upload()
        if batch.lora is not None:
            for name, array in batch.lora.matrices.items():
                binding.bind_ortvalue_input(name, shared_value(array))
        run = _Run(BoundRun(binding, options=run_options(None)), inputs, best, logits)
        run.bound.run(self._session)
        if states is not None:
            states[...] = binding.get_outputs()[-1].numpy()[:, 0]
        return run

    def _cached(self) -> Any:
        """Return a binding with the caches."""
        binding = self._session.io_binding()
        self._memory.bind_caches(binding, 0, self._memory.slots)
        return binding

    def _bound(
        self, binding: Any, shapes: Shapes, bounds: npt.NDArray[np.int32], logits: Any, wanted: int
    ) -> tuple[DeviceBlock, DeviceBlock]:
        """Bind inputs and logits; return the places of the inputs and of the largest logits."""
        device = self._memory.device
        inputs = DeviceBlock(shapes, self._memory.bytes_of)
        inputs.bind_inputs(binding, device.name, device.index)
        binding.bind_ortvalue_input(BOUNDS, shared_value(bounds))
        shape = [wanted, 1, self._graph.vocab_size]
        binding.bind_output(LOGITS, device.name, device.index, np.float32, shape, logits.data_ptr())
        best = DeviceBlock(self._best_shapes(wanted), self._memory.bytes_of)
        best.bind_outputs(binding, device.name, device.index)
        return inputs, best

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

    def _results(self, batch: PagedBatch, run: _Run) -> Logits | list[Logits | BestLogits]:
        count = len(batch.logits_positions)
        if not any(batch.late):
            return self._read(run, 0, count)
        run.best.download()
        best = run.best.arrays
        results: list[Logits | BestLogits] = []
        for row, late in enumerate(batch.late):
            if not late:
                results.append(self._read(run, row, 1)[0])
                continue
            ids, logits = best[TOP_TOKEN_IDS][row, 0].copy(), best[TOP_LOGITS][row, 0].copy()
            total = float(best[LOGSUMEXP][row, 0])
            whole = partial(self._whole, run, row)
            results.append(BestLogits(ids, logits, total, self._graph.vocab_size, whole))
        return results

    def _whole(self, run: _Run, row: int) -> Logits:
        try:
            logits: Logits = self._read(run, row, 1)[0]
        except ProviderUnavailableError as error:
            raise ProviderRuntimeError(f"logits could not be downloaded: {error}") from error
        return logits

    def _read(self, run: _Run, first: int, count: int) -> Logits:
        """Download all logits of some wanted rows."""
        logits = np.empty((count, self._graph.vocab_size), np.float32)
        self._memory.read(run.logits.data_ptr() + first * logits.shape[1] * 4, logits)
        return logits

    def _forget(self, form: Form | None) -> None:
        """Forget a binding that failed half-way: it would end the process when it is bound again."""
        self._loose = None
        if form is not None:
            self._captured.pop(form, None)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ``PagedSession``."""
        self._memory.copy_prefix(source, target, self._memory.length)

    def read_blocks(self, blocks: GroupBlocks) -> list[npt.NDArray[Any]]:
        """See ``PagedSession``."""
        raise ProviderRuntimeError("KV on this device cannot be read")

    def write_blocks(self, blocks: GroupBlocks, parts: Sequence[npt.NDArray[Any]]) -> None:
        """See ``PagedSession``."""
        raise ProviderRuntimeError("KV on this device cannot be written")

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
    if batch.image_states is not None and batch.image_rows is not None:
        feeds |= {IMAGE_STATES: batch.image_states, IMAGE_ROWS: batch.image_rows[:, None]}
    if batch.image_ahead is not None:
        feeds[IMAGE_AHEAD] = batch.image_ahead[:, None]
    if batch.rope_positions is not None:
        feeds[ROPE_POSITIONS] = batch.rope_positions[:, :, None]
    return {name: array for name, array in feeds.items() if name in inputs}
