"""Sessions of paged graphs with carryall's own kernel: KV blocks in host memory, written in place."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    CONTEXT_LENGTH,
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LORA_MASK,
    NUM_TOKENS,
    SLIDING_WINDOWS,
    is_past,
)
from ...errors import GraphError, ProviderRuntimeError
from ...graph_opt.lower.paged_kv import CACHE_TYPE, CACHE_TYPES, TABLE, table_input, width_of
from ..base import KVEviction, RunnerConfig, RunnerInfo
from ..kv.block_memory import BlockMemory, BlockShape
from ..kv.block_pool import BlockTables
from ..kv.slot_graph import chosen_context_length, stated_number
from ..kv_groups import TRIM_STEP, KVGroup, KVGroups, widest, window_groups
from ..lora import LoraInputs, LoraPlaces, lora_facts, lora_modules
from ..native.library import stores_pairs
from ..runners.explicit_runner import known_size
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch, PagedRunner
from . import ort
from .paged import paged_feeds
from .slot_memory import shared_value

_WIDTH_STEP = 8  # blocks; a longer text changes the shape of a decoding step every 256 tokens
_MAX_BINDINGS = 64


@dataclass(frozen=True, slots=True)
class HostPagedGraph:
    """The interface of a graph with carryall's ``PagedAttention``.

    Args:
        shapes: a block of each cache, by name.
        tables: name of the block table of each group of layers.
        cache_type: the type of the caches.
        vocab_size: columns of the logits.
        context_length: maximum tokens of a sequence.
        hidden_size: width of the input ``hidden_states``, None if there is none.
        embedding_size: width of the output ``last_hidden_state``, 0 if there is none.
        num_tokens: rows of the embedding table, None if unknown.
        lora_modules: number of inputs and outputs of the modules that adapters can change.
    """

    shapes: dict[str, BlockShape]
    tables: tuple[str, ...]
    cache_type: str
    vocab_size: int
    context_length: int
    hidden_size: int | None
    embedding_size: int
    num_tokens: int | None
    lora_modules: Mapping[str, tuple[int, int]]

    @property
    def groups(self) -> KVGroups:
        """The groups of layers: those whose caches have the same block table."""
        found = list[KVGroup]()
        for index in range(len(self.tables)):
            members = [shape for shape in self.shapes.values() if shape.group == index]
            window = widest(shape.window for shape in members)
            found += window_groups([(window, sum(shape.bytes_per_token for shape in members))], TRIM_STEP)
        return tuple(found)


def is_host_paged(session: Any) -> bool:
    """Whether a session's graph has carryall's ``PagedAttention``."""
    return CACHE_TYPE in session.get_modelmeta().custom_metadata_map


def read_host_paged_graph(session: Any, source: str) -> HostPagedGraph:
    """Return the interface of a paged graph, read from its session.

    Raises:
        GraphError: layers have blocks of different numbers of positions.
    """
    facts = session.get_modelmeta().custom_metadata_map
    windows = json.loads(facts.get(SLIDING_WINDOWS, "{}"))
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    caches = {name: value.shape for name, value in inputs.items() if is_past(name)}
    by_cache = {name: _table(windows.get(name, 0), inputs) for name in caches}
    tables = tuple(dict.fromkeys(by_cache.values()))
    shapes = {
        name: _block_shape(shape, windows.get(name, 0), facts[CACHE_TYPE], tables.index(by_cache[name]))
        for name, shape in caches.items()
    }
    if len({shape.size for shape in shapes.values()}) != 1:
        raise GraphError(f"{source} has no paged KV cache with blocks of one size")
    states = inputs.get(HIDDEN_STATES)
    return HostPagedGraph(
        shapes,
        tables,
        facts[CACHE_TYPE],
        known_size(outputs[LOGITS].shape[-1], source),
        int(facts[CONTEXT_LENGTH]),
        None if states is None else states.shape[-1],
        outputs[LAST_HIDDEN_STATE].shape[-1] if LAST_HIDDEN_STATE in outputs else 0,
        stated_number(session, NUM_TOKENS, source),
        lora_modules({name: value.shape for name, value in inputs.items()}),
    )


def _table(window: int, inputs: Collection[str]) -> str:
    """Return the block table of caches with a window: its own, or the only one."""
    own = table_input(window)
    return own if own in inputs else TABLE


def _block_shape(shape: Sequence[int], window: int, cache_type: str, group: int) -> BlockShape:
    _, heads, size, row_bytes = shape
    paired = stores_pairs(width_of(row_bytes, cache_type), size, CACHE_TYPES[cache_type])
    return BlockShape(heads, size, row_bytes, window, paired, group)


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
        graph: the interface of the graph.
    """

    def __init__(self, session: Any, memory: BlockMemory, graph: HostPagedGraph) -> None:
        self._session, self._memory, self._tables = session, memory, graph.tables
        self._inputs = {value.name for value in session.get_inputs()}
        self._caches = {name: shared_value(cache) for name, cache in memory.caches.items()}
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._logits = np.empty((0, 1, graph.vocab_size), np.float32)

    def run(self, batch: PagedBatch) -> Logits:
        """See ``PagedSession``."""
        feeds, states = paged_feeds(batch, self._inputs, self._tables, _WIDTH_STEP), batch.last_hidden_states
        wanted = len(batch.logits_positions)
        try:
            bound = self._binding(feeds, wanted)
            for name, array in feeds.items():
                bound.feeds[name][...] = array
            if batch.lora is not None:
                bound.bind_lora(batch.lora)
            if states is not None:
                bound.binding.bind_ortvalue_output(LAST_HIDDEN_STATE, shared_value(states[:, None]))
            self._session.run_with_iobinding(bound.binding)
        except ort.runtime_errors() as error:
            rows = len(batch.past_lens)
            raise ProviderRuntimeError(f"a run of {rows} rows failed: {ort.one_line(error)}") from error
        finally:
            if states is not None:  # the binding keeps the caller's array
                self._bound.clear()
        return self._logits[:wanted, 0]

    def _binding(self, feeds: Mapping[str, npt.NDArray[Any]], wanted: int) -> _Bound:
        """Return a binding for these shapes, with arrays of its own."""
        if len(self._logits) < wanted:
            self._logits = np.empty((wanted, 1, self._logits.shape[2]), np.float32)
            self._bound.clear()
        columns = feeds[LORA_MASK].shape[2] if LORA_MASK in feeds else 0
        key = (*feeds[INPUT_IDS].shape, *feeds[self._tables[0]].shape, wanted, columns)
        if key not in self._bound:
            if len(self._bound) >= _MAX_BINDINGS:
                self._bound.pop(next(iter(self._bound)))
            binding = self._session.io_binding()
            own = {name: np.empty_like(array, order="C") for name, array in feeds.items()}
            for name, value in [*self._caches.items(), *((n, shared_value(a)) for n, a in own.items())]:
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(LOGITS, shared_value(self._logits[:wanted]))
            self._bound[key] = _Bound(binding, own)
        return self._bound[key]

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ``PagedSession``."""
        self._memory.copy_block(group, source, target)

    def read_blocks(self, blocks: GroupBlocks) -> list[npt.NDArray[Any]]:
        """See ``PagedSession``."""
        return self._memory.read(blocks)

    def write_blocks(self, blocks: GroupBlocks, parts: Sequence[npt.NDArray[Any]]) -> None:
        """See ``PagedSession``."""
        try:
            self._memory.write(blocks, parts)
        except ValueError as error:
            raise ProviderRuntimeError(f"the KV has another layout: {error}") from error

    def evict_kv(self, blocks: GroupBlocks, targets: GroupBlocks, held: int, eviction: KVEviction) -> None:
        """See ``PagedSession``."""
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
    graph = read_host_paged_graph(session, source)
    length = chosen_context_length(config.context_length, graph.context_length, source)
    size = next(iter(graph.shapes.values())).size
    blocks = config.max_slots * -(-length // size)
    memory = BlockMemory(graph.shapes, blocks, graph.cache_type)
    info = RunnerInfo(
        graph.vocab_size,
        length,
        config.max_slots,
        graph.groups,
        batched_multi_token=True,
        kv_layout=memory.layout,
        embedding_size=graph.embedding_size,
        evicts_kv=True,
        num_tokens=graph.num_tokens,
        **lora_facts(graph.lora_modules, config),
    )
    loras = LoraPlaces(graph.lora_modules, config.max_loras, config.max_lora_rank)
    tables = BlockTables(blocks, size, config.max_slots, len(graph.tables))
    paged = HostPagedSession(session, memory, graph)
    return PagedRunner(paged, tables, info, graph.hidden_size, loras if graph.lora_modules else None)
