"""Sessions of paged graphs with carryall's own kernel: KV blocks in host memory, written in place."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    ENCODER_ROWS,
    ENCODER_STATES,
    IMAGE_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LORA_MASK,
)
from ...errors import GraphError, ProviderRuntimeError
from ...graph_opt.lower.paged_kv import CACHE_TYPE, CACHE_TYPES, COMPRESSED, TABLE, table_input, width_of
from ...records import dataclass
from ..base import KVEviction, RunnerConfig
from ..kv.block_memory import BlockMemory, BlockShape
from ..kv.block_pool import BlockTables
from ..kv.decoder_graph import DecoderGraph, chosen_context_length, read_graph
from ..kv.encoder_rows import EncoderRows
from ..kv.state_memory import StateMemory
from ..kv_groups import TRIM_STEP, EncoderKV, KVGroup, KVGroups, StateKV, widest, window_groups
from ..lora import LoraInputs, LoraPlaces
from ..native.library import stores_pairs
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch, PagedRunner, Span
from . import ort
from .paged import paged_feeds
from .slot_memory import shared_value

_WIDTH_STEP = 8  # blocks; a longer text changes the shape of a decoding step every 256 tokens
_MAX_BINDINGS = 64


def is_host_paged(session: Any) -> bool:
    """Whether a session's graph has carryall's ``PagedAttention``."""
    return CACHE_TYPE in session.get_modelmeta().custom_metadata_map


def _shapes(graph: DecoderGraph) -> tuple[dict[str, BlockShape], list[str]]:
    """Return a block of each cache, and the name of the block table of each group of layers."""
    windows = {name: spec.window or 0 for name, spec in graph.caches.items()}
    by_cache = {name: _table(window, graph.inputs) for name, window in windows.items()}
    tables, size, kind = list(dict.fromkeys(by_cache.values())), graph.block_size, graph.metadata[CACHE_TYPE]
    paired = {
        width: stores_pairs(width_of(width, kind), size, CACHE_TYPES[kind])
        for width in {spec.width for spec in graph.caches.values()}
    }
    # Compressed keys are the values too. Pairs and int8 have other layouts for keys than for values.
    compressed = {
        width for width in paired if COMPRESSED in graph.metadata and kind != "int8" and not paired[width]
    }
    shapes = {
        name: BlockShape(
            spec.heads,
            size,
            spec.width,
            windows[name],
            paired=paired[spec.width],
            group=tables.index(by_cache[name]),
            compressed=spec.width in compressed,
        )
        for name, spec in graph.caches.items()
        if spec.width not in compressed or _keys_of(name) == name
    }
    return shapes, tables


def _keys_of(cache: str) -> str:
    """Return the name of the cache of keys of the same layer."""
    return cache.removesuffix(".value") + ".key" if cache.endswith(".value") else cache


def _groups(shapes: Collection[BlockShape], count: int) -> KVGroups:
    """Return the groups of layers: those whose caches have the same block table."""
    groups = list[KVGroup]()
    for index in range(count):
        members = [shape for shape in shapes if shape.group == index]
        window = widest(shape.window for shape in members)
        groups += window_groups([(window, sum(shape.bytes_per_token for shape in members))], TRIM_STEP)
    return tuple(groups)


def _table(window: int, inputs: Collection[str]) -> str:
    """Return the block table of caches with a window: its own, or the only one."""
    own = table_input(window)
    return own if own in inputs else TABLE


@dataclass(slots=True)
class _Bound:
    """A binding, its inputs, whose content changes from run to run, and the bound adapters."""

    binding: Any
    feeds: dict[str, npt.NDArray[Any]]
    lora: LoraInputs | None = None

    def bind_lora(self, lora: LoraInputs) -> None:
        """Bind the matrices of adapters, unless they are bound."""
        if self.lora is None or self.lora.state != lora.state:
            for name, array in lora.matrices.items():
                self.binding.bind_ortvalue_input(name, shared_value(array))
            self.lora = lora


class HostPagedSession:
    """A ``PagedSession`` on the CPU. Runs of equal shapes share a binding.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of a paged graph.
        memory: its caches.
        tables: name of the block table of each group of layers.
        vocab_size: columns of the logits.
        states: its recurrent states, and caches of an encoder's rows, by name; the graph writes into them.
    """

    def __init__(
        self,
        session: Any,
        memory: BlockMemory,
        tables: Sequence[str],
        vocab_size: int,
        states: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        self.session, self._memory, self._tables = session, memory, tables
        self._inputs = {value.name for value in session.get_inputs()}
        held: dict[str, npt.NDArray[Any]] = {**memory.caches, **states}
        for name in self._inputs - held.keys():
            if _keys_of(name) in memory.caches:  # one cache is both
                held[name] = memory.caches[_keys_of(name)]
        self._caches = {name: shared_value(array) for name, array in held.items()}
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._logits = np.empty((0, 1, vocab_size), np.float32)
        self._hidden = np.empty((0, 1, 0), np.float32)  # last hidden states of a run that returns them

    def run(self, batch: PagedBatch) -> Logits:
        feeds, states = paged_feeds(batch, self._inputs, self._tables, _WIDTH_STEP), batch.last_hidden_states
        wanted = len(batch.logits_positions)
        try:
            bound = self._binding(feeds, wanted, 0 if states is None else states.shape[1])
            for name, array in feeds.items():
                bound.feeds[name][...] = array
            if batch.lora is not None:
                bound.bind_lora(batch.lora)
            self.session.run_with_iobinding(bound.binding)
        except ort.runtime_errors() as error:
            raise ort.run_error(len(batch.past_lens), error) from error
        if states is not None:
            states[:] = self._hidden[: len(states), 0]
        return self._logits[:wanted, 0]

    def _binding(self, feeds: Mapping[str, npt.NDArray[Any]], wanted: int, width: int) -> _Bound:
        """Return a binding for these shapes, with arrays of its own.

        Args:
            feeds: the inputs that change.
            wanted: number of logits.
            width: of the last hidden states; 0 if they are not returned.
        """
        tokens = len(feeds[INPUT_IDS]) if width else 0
        if len(self._hidden) < tokens:
            self._hidden = np.empty((tokens, 1, width), np.float32)
            self._bound.clear()
        if len(self._logits) < wanted:
            self._logits = np.empty((wanted, 1, self._logits.shape[2]), np.float32)
            self._bound.clear()
        columns = feeds[LORA_MASK].shape[2] if LORA_MASK in feeds else 0
        seen = len(feeds[IMAGE_STATES]) if IMAGE_STATES in feeds else 0
        encoded = len(feeds[ENCODER_STATES]) if ENCODER_STATES in feeds else 0
        key = (*feeds[INPUT_IDS].shape, *feeds[self._tables[0]].shape, wanted, columns, seen, encoded, width)
        if key not in self._bound:
            if len(self._bound) >= _MAX_BINDINGS:
                self._bound.pop(next(iter(self._bound)))
            binding = self.session.io_binding()
            arrays = {name: np.empty_like(array, order="C") for name, array in feeds.items()}
            for name, value in [*self._caches.items(), *((n, shared_value(a)) for n, a in arrays.items())]:
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(LOGITS, shared_value(self._logits[:wanted]))
            if width:
                binding.bind_ortvalue_output(LAST_HIDDEN_STATE, shared_value(self._hidden[:tokens]))
            self._bound[key] = _Bound(binding, arrays)
        return self._bound[key]

    def copy_block(self, group: int, source: int, target: int) -> None:
        self._memory.copy_block(group, source, target)

    def read_blocks(self, blocks: GroupBlocks, span: Span) -> list[npt.NDArray[Any]]:
        return self._memory.read(blocks)

    def write_blocks(self, blocks: GroupBlocks, span: Span, parts: Sequence[npt.NDArray[Any]]) -> None:
        try:
            self._memory.write(blocks, parts)
        except ValueError as error:
            raise ProviderRuntimeError(f"the KV has another layout: {error}") from error

    def evict_kv(self, blocks: GroupBlocks, targets: GroupBlocks, held: int, eviction: KVEviction) -> None:
        self._memory.evict_kv(blocks, targets, held, eviction)


def host_paged_runner(session: Any, config: RunnerConfig, source: str) -> PagedRunner:
    """Return the runner of a graph with carryall's ``PagedAttention``.

    Address space is reserved for all slots; a block takes memory from its first write.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of the graph.
        config: options of the runner.
        source: the name of the model in error messages.

    Raises:
        GraphError: the graph is damaged.
        UsageError: the context length is not positive, or exceeds the graph's.
        ProviderRuntimeError: the address space cannot be reserved.
    """
    graph = read_graph(session, source)
    if not graph.block_size:
        raise GraphError(f"{source} has no paged KV cache with blocks of one size")
    length = chosen_context_length(config.context_length, graph.context_length, source)
    shapes, names = _shapes(graph)
    blocks = config.max_slots * -(-length // graph.block_size)
    memory = BlockMemory(shapes, blocks, graph.metadata[CACHE_TYPE])
    groups, states = _groups(shapes.values(), len(names)), None
    abilities: dict[str, Any] = {"kv_layout": memory.layout, "evicts_kv": True}
    if graph.states:
        states, tokens = _states(graph, groups, config.max_slots, length)
        groups = (*groups, StateKV(state_bytes=states.bytes_each))
        layout = f"{memory.layout}; states: {states.layout}"
        abilities = {"kv_layout": layout, "state_arrays": len(states.arrays), "kv_tokens": tokens}
    encoder, arrays = None, {} if states is None else dict[str, npt.NDArray[Any]](states.arrays)
    if graph.encoder_width:
        encoder, memory_of_rows, group = _encoder_rows(graph, config.max_slots)
        groups, arrays = (*groups, group), {**arrays, **memory_of_rows.caches}
        abilities |= {"kv_layout": "", "evicts_kv": False}  # KV alone does not say what its rows attended to
    info = graph.info(config, groups, length=length, batched_multi_token=True, **abilities)
    loras = LoraPlaces(graph.lora_modules, config.max_loras, config.max_lora_rank)
    tables = BlockTables(blocks, graph.block_size, config.max_slots, len(names))
    paged = HostPagedSession(session, memory, names, graph.vocab_size, arrays)
    places = loras if graph.lora_modules else None
    return PagedRunner(paged, tables, info, graph.hidden_size, places, states, encoder=encoder)


def _encoder_rows(graph: DecoderGraph, slots: int) -> tuple[EncoderRows, BlockMemory, EncoderKV]:
    """Return the places of an encoder's rows, their memory, and its group of layers.

    Raises:
        GraphError: the graph does not state how many rows there may be.
    """
    if not graph.encoder_rows:
        raise GraphError(f"the graph does not state '{ENCODER_ROWS}'; export the model again")
    size, kind = graph.block_size, graph.metadata[CACHE_TYPE]
    shapes = {
        name: BlockShape(
            spec.heads,
            size,
            spec.width,
            paired=stores_pairs(width_of(spec.width, kind), size, CACHE_TYPES[kind]),
        )
        for name, spec in graph.encoder_caches.items()
    }
    row_bytes = sum(shape.bytes_per_token for shape in shapes.values())
    rows = EncoderRows(graph.encoder_rows, graph.encoder_width, size, slots, row_bytes)
    group = EncoderKV(row_bytes=row_bytes, most_rows=graph.encoder_rows)
    return rows, BlockMemory(shapes, rows.num_blocks, kind), group


def _states(graph: DecoderGraph, groups: KVGroups, slots: int, length: int) -> tuple[StateMemory, int]:
    """Return the states of a graph, and the budget in tokens that they share with the KV.

    The budget is a whole text, its newest state and one kept state for each slot; slots that need less KV
    leave room for more states.
    """
    each = 4 * sum(math.prod(shape) for shape in graph.states.values())
    tokens_each = -(-each // max(1, sum(group.bytes_per_token for group in groups)))
    budget = slots * (length + 2 * tokens_each)
    # Each row of a step may need another place before it gives one back, and one with proposals keeps the
    # state before it.
    return StateMemory(graph.states, budget // tokens_each + 2 * slots, slots), budget
