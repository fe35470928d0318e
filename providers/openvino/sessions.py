"""Sessions of compiled OpenVINO graphs with their KV caches, for the runners. Imports openvino."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino

from ...contract import (
    DRAW,
    DRAWN,
    DRAWN_BEFORE,
    ENCODER_STATES,
    HIDDEN_STATES,
    INPUT_IDS,
    LAST_HIDDEN_STATE,
    LOGITS,
    LOGITS_POSITIONS,
    LOGSUMEXP,
    LORA_MASK,
    POSITION_IDS,
    TOKEN_SOURCES,
    TOP_LOGITS,
    TOP_TOKEN_IDS,
    present_of,
)
from ...errors import ProviderRuntimeError
from ...graph_opt.lower.pipelines.paged_form import PagedLayer
from ..base import BestLogits, KVEviction
from ..draws import controls_of
from ..kv.decoder_graph import DecoderGraph
from ..kv.kv_blocks import AFFINE_BYTES, BlockLayer
from ..lora import LoraInputs
from ..runners.paged_runner import GroupBlocks, Logits, PagedBatch, Span
from .model import one_line


class _Request:
    """An ``openvino.InferRequest``, and the host arrays that it reads its inputs from."""

    def __init__(self, compiled: Any, caches: Mapping[str, Any]) -> None:
        self._request = compiled.create_infer_request()
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._lora: LoraInputs | None = None  # whose matrices the request reads
        for name, tensor in caches.items():
            self._request.set_tensor(name, tensor)

    def infer(self) -> None:
        """Run once, and wait for it."""
        self._request.infer()

    def output(self, name: str) -> npt.NDArray[Any]:
        """Return an output of the last run, which the next one overwrites."""
        array: npt.NDArray[Any] = self._request.get_tensor(name).data
        return array

    def feed(self, name: str, array: npt.NDArray[Any]) -> None:
        """Set an input; its array is reused if the shape is that of the last run, as it mostly is."""
        held = self._held.get(name)
        if held is not None and held.shape == array.shape:
            held[...] = array
            return
        self._held[name] = held = np.array(array)
        self._request.set_tensor(name, openvino.Tensor(held, shared_memory=True))

    def feed_lora(self, lora: LoraInputs) -> None:
        """Set the inputs for adapters; the matrices are shared, and set again if they have changed."""
        self.feed(LORA_MASK, lora.mask)
        if self._lora is None or self._lora.state != lora.state:
            for name, array in lora.matrices.items():
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            self._lora = lora


class _Flight:
    """A run that was given to the session's thread; see ``PagedFlight``."""

    def __init__(self, run: Future[npt.NDArray[np.int64]], results: Callable[[], Any]) -> None:
        self._run, self._results = run, results
        self.drawn = np.empty(0, np.int64)

    def finish(self) -> Logits | list[Logits | BestLogits]:
        """Return the results when the run is done."""
        self.drawn = self._run.result()
        found: Logits | list[Logits | BestLogits] = self._results()
        return found


class OpenVinoPagedSession:
    """A ``PagedSession``, and an ``AheadSession`` if the graph draws tokens; see ``docs/openvino.md``.

    A graph that draws tokens has two requests in turns. A thread runs them in order, and gives each the
    tokens that the one before has drawn, so that no device needs to order two requests.

    Args:
        compiled: an ``openvino.CompiledModel`` of a paged graph.
        caches: the KV tensors by input name, [blocks, ...] each.
        layers: the attention layers of the graph.
        block_size: positions per block.
    """

    def __init__(
        self, compiled: Any, caches: Mapping[str, Any], layers: Sequence[PagedLayer], block_size: int
    ) -> None:
        self._block_size = block_size
        self._caches = list(caches.values())
        self._layers = [(caches[layer.key], caches[layer.value], layer) for layer in layers]
        self._names = {name for port in compiled.inputs for name in port.get_names()}
        self._draws = DRAW in self._names
        self._requests = [_Request(compiled, caches) for _ in range(1 + self._draws)]
        self._thread = ThreadPoolExecutor(1, "openvino") if self._draws else None
        self._drawn = np.zeros(1, np.int64)  # by the last run; for the thread alone

    def run(self, batch: PagedBatch) -> Logits | list[Logits | BestLogits]:
        if self._draws:
            return self.begin(batch).finish()
        with _failures(batch):
            self._feed(self._requests[0], batch)
            self._requests[0].infer()
            return _results(self._requests[0], batch)

    def begin(self, batch: PagedBatch) -> _Flight:
        """See ``AheadSession``."""
        assert self._thread is not None  # noqa: S101 -- a graph that draws tokens
        self._requests.reverse()
        request, wanted = self._requests[0], len(batch.logits_positions)
        with _failures(batch):
            self._feed(request, batch)
            request.feed(DRAW, controls_of(batch.draws, wanted))
            sources = np.zeros_like(batch.input_ids) if batch.sources is None else batch.sources
            request.feed(TOKEN_SOURCES, sources[:, None])

        def compute() -> npt.NDArray[np.int64]:
            before, self._drawn = self._drawn, np.zeros(wanted, np.int64)  # if the run fails
            with _failures(batch):
                request.feed(DRAWN_BEFORE, before)
                request.infer()
            self._drawn = request.output(DRAWN).copy()
            return self._drawn

        return _Flight(self._thread.submit(compute), lambda: _results(request, batch))

    def _feed(self, request: _Request, batch: PagedBatch) -> None:
        for name, array in _feeds(batch.without_freed(self._block_size)).items():
            if name in self._names:  # traces with ALiBi may have no position_ids
                request.feed(name, array)
        if batch.lora is not None:
            request.feed_lora(batch.lora)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ``PagedSession``; works on any device."""
        if self._thread is None:
            self._copy(source, target)
        else:
            self._thread.submit(self._copy, source, target).result()  # behind a run that may write the block

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._caches:
            rest = list(tensor.shape)[1:]
            begin, end = [0] * len(rest), rest
            part = openvino.Tensor(tensor, [source, *begin], [source + 1, *end])
            try:
                part.copy_to(openvino.Tensor(tensor, [target, *begin], [target + 1, *end]))
            except RuntimeError as error:
                raise ProviderRuntimeError(f"copying a KV block failed: {one_line(error)}") from error

    def read_blocks(self, blocks: GroupBlocks, span: Span) -> list[npt.NDArray[Any]]:
        return [tensor.data[blocks[0]] for tensor in self._caches]

    def write_blocks(self, blocks: GroupBlocks, span: Span, parts: Sequence[npt.NDArray[Any]]) -> None:
        for tensor, part in zip(self._caches, parts, strict=True):
            tensor.data[blocks[0]] = part

    @property
    def rows_are_whole(self) -> bool:
        """Whether single rows of the caches can be read and moved, if they are on the host."""
        return all(_rows_are_whole(*layer) for layer in self._layers)

    def evict_kv(self, blocks: GroupBlocks, targets: GroupBlocks, held: int, eviction: KVEviction) -> None:
        for keys, values, layer in self._layers:
            bfloat = keys.element_type == openvino.Type.bf16
            view = BlockLayer(keys.data, values.data, bfloat, layer.window > 0)
            view.evict_kv(blocks[0], targets[0], held, eviction)


class OpenVinoExplicitSession:
    """An ``ExplicitSession``: a run reads the caches from the tensors that the last run wrote.

    Args:
        compiled: an ``openvino.CompiledModel`` of a graph with explicit KV.
        graph: the interface of the graph.
    """

    def __init__(self, compiled: Any, graph: DecoderGraph) -> None:
        self.graph = graph
        self._request = compiled.create_infer_request()

    def run(
        self, feeds: Mapping[str, npt.NDArray[Any]], past: Sequence[Any], states: Logits | None = None
    ) -> tuple[Logits, list[Any]]:
        present = []
        try:
            for name, array in feeds.items():
                self._request.set_tensor(name, openvino.Tensor(array))
            for name, tensor in zip(self.graph.explicit_inputs, past, strict=True):
                shape = list(tensor.shape)
                if name not in self.graph.states:
                    rows = feeds[ENCODER_STATES if name in self.graph.encoder_caches else INPUT_IDS]
                    shape[2] += rows.shape[1]
                present.append(openvino.Tensor(tensor.element_type, openvino.Shape(shape)))
                self._request.set_tensor(name, tensor)
                self._request.set_tensor(present_of(name), present[-1])
            self._request.infer()
        except RuntimeError as error:
            raise ProviderRuntimeError(f"a run of one row failed: {one_line(error)}") from error
        if states is not None:
            states[:] = self._request.get_tensor(LAST_HIDDEN_STATE).data[0]
        logits: Logits = self._request.get_tensor(LOGITS).data[0]
        return logits.copy(), present  # copied, since the next run overwrites the tensor

    def to_host(self, value: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = value.data
        return array

    def from_host(self, array: npt.NDArray[Any]) -> Any:
        return openvino.Tensor(array, shared_memory=False)


def _results(request: _Request, batch: PagedBatch) -> Logits | list[Logits | BestLogits]:
    """Return the results of a run that is done."""
    if batch.last_hidden_states is not None:
        batch.last_hidden_states[:] = request.output(LAST_HIDDEN_STATE)[:, 0]
    logits: Logits = request.output(LOGITS)[:, 0]
    if not any(batch.late):
        return logits
    ids, best, sums = (request.output(name) for name in (TOP_TOKEN_IDS, TOP_LOGITS, LOGSUMEXP))
    # The second next step overwrites the originals.
    ids, best = ids[:, 0].astype(np.int64), best[:, 0].copy()
    return [
        BestLogits(
            ids[row], best[row], float(sums[row, 0]), logits.shape[1], partial(logits.__getitem__, row)
        )
        if late
        else logits[row]
        for row, late in enumerate(batch.late)
    ]


@contextmanager
def _failures(batch: PagedBatch) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        rows = len(batch.past_lens)
        raise ProviderRuntimeError(f"a run of {rows} rows failed: {one_line(error)}") from error


def make_cache(core: Any, device: str, dtype: Any, shape: list[int]) -> Any:
    """Allocate KV memory on the device; on the CPU a page takes memory from its first write.

    Raises:
        ProviderRuntimeError: the device has not enough memory.
    """
    try:
        if device == "CPU":
            return openvino.Tensor(dtype, openvino.Shape(shape))
        return core.get_default_context(device).create_tensor(dtype, openvino.Shape(shape), {})
    except RuntimeError as error:
        raise ProviderRuntimeError(f"no memory for a KV cache of shape {shape}: {error}") from error


def _rows_are_whole(keys: Any, values: Any, layer: PagedLayer) -> bool:
    """Whether each row has its own scale (not one per block) and consists of whole bytes."""
    small = keys.element_type == openvino.Type.u8
    plain = keys.element_type in (openvino.Type.f32, openvino.Type.f16, openvino.Type.bf16)
    row = [values.shape[2], layer.head_size + AFFINE_BYTES * small]
    return (plain or small) and list(keys.shape)[2:] == list(values.shape)[2:] == row


def _feeds(batch: PagedBatch) -> dict[str, npt.NDArray[Any]]:
    (tables,) = batch.tables
    sizes = [len(table) for table in tables]
    feeds: dict[str, npt.NDArray[Any]] = {
        INPUT_IDS: batch.input_ids[:, None],
        POSITION_IDS: batch.position_ids[:, None],
        LOGITS_POSITIONS: batch.logits_positions,
        "past_lens": batch.past_lens,
        "subsequence_begins": batch.begins,
        "block_indices": np.concatenate(tables).astype(np.int32),
        "block_indices_begins": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        "max_context_len": np.array(batch.max_context, np.int32),
    }
    if batch.hidden_states is not None:
        feeds[HIDDEN_STATES] = batch.hidden_states[:, None]
    return feeds
