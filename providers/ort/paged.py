"""Sessions of paged graphs in ONNX Runtime: KV blocks on the device, block tables uploaded for every run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    HIDDEN_STATES,
    IMAGE_AHEAD,
    IMAGE_ROWS,
    IMAGE_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_POSITIONS,
    LORA_MASK,
    POSITION_IDS,
    ROPE_POSITIONS,
)
from ...errors import GraphError, ProviderRuntimeError
from ...graph_opt.lower.paged_kv import BEGINS, BOUNDS, PAST, STATE_PLACES, TABLE
from ..base import KVEviction
from ..kv.block_pool import FREED
from ..kv.decoder_graph import DecoderGraph, read_graph
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch
from . import ort
from .device_memory import DeviceMemory
from .slot_memory import shared_value


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


class OrtPagedSession:
    """A ``PagedSession`` on an execution provider.

    Args:
        session: an open ``onnxruntime.InferenceSession`` of a paged graph.
        memory: its caches; each block is a slot of this memory.
    """

    def __init__(self, session: Any, memory: DeviceMemory) -> None:
        self._session, self._memory = session, memory
        self._inputs = {value.name for value in session.get_inputs()}

    def run(self, batch: PagedBatch) -> Logits:
        """See ``PagedSession``."""
        self._memory.enter()
        binding = self._session.io_binding()
        try:
            matrices = {} if batch.lora is None else batch.lora.matrices
            for name, array in {**paged_feeds(batch, self._inputs), **matrices}.items():
                binding.bind_ortvalue_input(name, shared_value(array))
            self._memory.bind_caches(binding, 0, self._memory.slots)
            binding.bind_output(LOGITS, "cpu")
            self._session.run_with_iobinding(binding)
        except ort.runtime_errors() as error:
            rows = len(batch.past_lens)
            raise ProviderRuntimeError(f"a run of {rows} rows failed: {ort.one_line(error)}") from error
        logits: Logits = binding.get_outputs()[-1].numpy()[:, 0]
        return logits

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
        feeds[BOUNDS] = np.array([np.diff(batch.begins).max(), batch.max_context], np.int32)
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
