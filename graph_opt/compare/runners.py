"""Run a decoder graph on the CPU, for comparisons.

One interface covers the two input contracts of ``docs/contract.md`` (portable, and slots of a shared KV
buffer) and traces without a cache, so that any two stages of a pipeline can be compared.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import (
    ATTENTION_MASK,
    ENCODER_MASK,
    ENCODER_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    is_past,
    is_past_encoder,
    is_past_state,
    present_of,
)
from ...errors import GraphError, UsageError
from ..graph.lazy import Array
from ..graph.load import load_model
from ..graph.session import open_session, running
from ..passes.importing.lift_attention import attended_sizes

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
_ENCODER_ROWS = 16
_TOKENS = {INPUT_IDS, ATTENTION_MASK, POSITION_IDS}
_CACHE_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
}


class GraphRunner(abc.ABC):
    """Runs a decoder graph.

    Args:
        model: the ``model.onnx`` of a portable graph or of one lowered to slots.
        session: an open session of ``model``; None to open one.
        name: its name in messages; by default the path.
    """

    def __init__(self, model: Path, session: Any = None, name: str | None = None) -> None:
        self.model = model
        self.name = name or str(model)
        self.session: Any = open_session(model) if session is None else session
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.cache_names = [name for name in self.inputs if is_past(name)]
        self.state_names = [name for name in self.inputs if is_past_state(name)]
        kept = map(present_of, [*self.cache_names, *self.state_names])
        absent = [name for name in (LOGITS, *kept) if name not in self.outputs]
        if absent:
            raise GraphError(f"{self.name} has no output {absent[0]}, which its inputs belong to")

    @property
    def vocab_size(self) -> int | str:
        """Size of the logits' last axis; a string if it is dynamic."""
        size: int | str = self.session.get_outputs()[self.outputs.index(LOGITS)].shape[-1]
        return size

    @abc.abstractmethod
    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Append tokens [n] to each sequence's cache, and return logits [n, vocab] per sequence."""

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Run ``forward`` of several new sequences, or of one token each, in one batch if the graph can."""
        return self.forward(rows)

    def fill(self, row: int, content: Mapping[str, Array]) -> None:
        """Set the cache of an empty sequence to ``content``, in the form that ``cache`` returns.

        Raises:
            UsageError: the graph has another cache, or none.
        """
        raise UsageError(f"{self.name} has no cache that can be set")

    def _check_content(self, content: Mapping[str, Array]) -> None:
        past = [*self.cache_names, *self.state_names]
        names = {present_of(name) for name in past}
        types = {present_of(name): _CACHE_TYPES[self.inputs[name].type] for name in past}
        if names != set(content) or any(types[name] != one.dtype for name, one in content.items()):
            raise UsageError(f"{self.name} has a cache with other names or types")

    @abc.abstractmethod
    def cache(self, row: int) -> dict[str, Array]:
        """Return a sequence's keys and values [kv_heads, length, head_dim], and states, by output names."""

    def _zero_cache(self, batch: int, length: int) -> dict[str, Array]:
        caches: dict[str, Array] = {}
        for name in self.cache_names:
            heads, size = self._cache_sizes[name]
            caches[name] = np.zeros((batch, heads, length, size), _CACHE_TYPES[self.inputs[name].type])
        for name in self.state_names:
            state = self.inputs[name]
            caches[name] = np.zeros((batch, *state.shape[1:]), _CACHE_TYPES[state.type])
        return caches

    @functools.cached_property
    def _cache_sizes(self) -> dict[str, tuple[int, int]]:
        """Heads and head size by cache input; from the attention that reads it if they are dynamic."""
        shapes = {name: self.inputs[name].shape for name in self.cache_names}
        sizes = {
            name: (heads, size)
            for name, (_, heads, _, size) in shapes.items()
            if isinstance(heads, int) and isinstance(size, int)
        }
        if len(sizes) < len(shapes):
            sizes |= attended_sizes(load_model(self.model).graph)
        unknown = [name for name in shapes if name not in sizes]
        if unknown:
            raise GraphError(f"{self.name}: number of heads and head size of {unknown[0]} are unknown")
        return sizes


class PortableRunner(GraphRunner):
    """A graph with explicit past and present; one sequence per run.

    A partially lowered graph, whose attention already needs cache lengths, receives them too.
    """

    def __init__(self, model: Path, session: Any = None, name: str | None = None) -> None:
        super().__init__(model, session, name)
        self._caches: dict[int, dict[str, Array]] = {}

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        return {row: self._run({row: tokens})[row] for row, tokens in rows.items()}

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """See ``GraphRunner``: padded on the left, with the padding masked."""
        if ATTENTION_MASK not in self.inputs or SEQLENS_K in self.inputs:
            return self.forward(rows)
        return self._run(rows)

    def fill(self, row: int, content: Mapping[str, Array]) -> None:
        self._check_content(content)
        past = [*self.cache_names, *self.state_names]
        self._caches[row] = {name: content[present_of(name)][None] for name in past}

    def cache(self, row: int) -> dict[str, Array]:
        return {present_of(name): content[0] for name, content in self._caches[row].items()}

    def _run(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        # One run takes all rows, padded at the left: each cache in front up to the longest past, each row's
        # tokens up to the widest. The mask hides both paddings, and what it hides is cut from the caches
        # afterwards, so that a row's cache never holds padding of the neighbours it had.
        pasts = [self._caches.setdefault(row, self._zero_cache(1, 0)) for row in rows]
        lengths = [past[self.cache_names[0]].shape[2] for past in pasts]
        past = {
            name: np.concatenate([_padded(one[name], max(lengths), axis=2) for one in pasts])
            for name in self.cache_names
        }
        past |= {name: np.concatenate([each[name] for each in pasts]) for name in self.state_names}
        width = max(map(len, rows.values()))
        mask = np.concatenate([_ones(lengths, max(lengths)), _ones(map(len, rows.values()), width)], axis=1)
        feed = {
            INPUT_IDS: np.stack([_padded(tokens, width, axis=0) for tokens in rows.values()]),
            ATTENTION_MASK: mask,
            POSITION_IDS: np.maximum(mask.cumsum(1) - 1, 0)[:, max(lengths) :],
            SEQLENS_K: mask.sum(1, dtype=np.int32) - 1,
            TOTAL_SEQUENCE_LENGTH: np.array(mask.shape[1], np.int32),
            LOGITS_POSITIONS: np.broadcast_to(np.arange(width), (len(rows), width)).copy(),
        }
        feed = {name: value for name, value in feed.items() if name in self.inputs} | past
        feed |= self._encoder_rows(len(rows))
        with running(self.name):
            results = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
        for number, row in enumerate(rows):
            kept = mask[number].astype(bool)
            self._caches[row] = {
                name: results[present_of(name)][number : number + 1][:, :, kept] for name in self.cache_names
            }
            self._caches[row] |= {
                name: results[present_of(name)][number : number + 1] for name in self.state_names
            }
        return {row: results[LOGITS][number, -len(rows[row]) :] for number, row in enumerate(rows)}

    def _encoder_rows(self, batch: int) -> dict[str, Array]:
        """Return rows of an encoder, if the graph attends to any: the same random ones in every run.

        A run that brings them anew computes what one does that finds their keys and values in its caches.
        """
        if ENCODER_STATES not in self.inputs:
            return {}
        states = self.inputs[ENCODER_STATES]
        rows = np.random.default_rng(0).standard_normal((1, _ENCODER_ROWS, states.shape[-1]))
        feed: dict[str, Array] = {
            ENCODER_STATES: np.repeat(rows.astype(_CACHE_TYPES[states.type]), batch, axis=0),
            ENCODER_MASK: np.ones((batch, _ENCODER_ROWS), np.int64),
        }
        for name in filter(is_past_encoder, self.inputs):
            _, heads, _, size = self.inputs[name].shape
            feed[name] = np.zeros((batch, heads, 0, size), _CACHE_TYPES[self.inputs[name].type])
        return feed


class WholeRunner(GraphRunner):
    """A graph without a cache, which computes all tokens of a sequence at every step."""

    def __init__(self, model: Path, session: Any = None, name: str | None = None) -> None:
        super().__init__(model, session, name)
        self._tokens: dict[int, Tokens] = {}

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        return {row: self._run({row: tokens})[row] for row, tokens in rows.items()}

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """See ``GraphRunner``: padded on the left, with the padding masked."""
        return self._run(rows) if ATTENTION_MASK in self.inputs else self.forward(rows)

    def cache(self, row: int) -> dict[str, Array]:
        """Return {}: there is no cache."""
        return {}

    def _run(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        for row, tokens in rows.items():
            self._tokens[row] = np.concatenate([self._tokens.get(row, tokens[:0]), tokens])
        whole = [self._tokens[row] for row in rows]
        width = max(map(len, whole))
        mask = _ones(map(len, whole), width)
        feed = {
            INPUT_IDS: np.stack([_padded(ids, width, axis=0) for ids in whole]),
            ATTENTION_MASK: mask,
            POSITION_IDS: np.maximum(mask.cumsum(1) - 1, 0),
        }
        with running(self.name):
            logits = self.session.run([LOGITS], {name: feed[name] for name in self.inputs})[0]
        return {row: logits[number, -len(rows[row]) :] for number, row in enumerate(rows)}


class SlotGraphRunner(GraphRunner):
    """A graph with slots of a shared buffer: one batched run if the kernel can, else one per sequence."""

    def __init__(
        self,
        model: Path,
        session: Any = None,
        name: str | None = None,
        *,
        slots: int = 4,
        max_length: int = 256,
    ) -> None:
        super().__init__(model, session, name)
        self._cache = self._zero_cache(slots, max_length)
        self._lengths = np.zeros(slots, np.int64)

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        fresh = all(self._lengths[row] == 0 for row in rows)
        if fresh or all(len(tokens) == 1 for tokens in rows.values()):
            return self._run(rows)
        return {row: self._run({row: tokens})[row] for row, tokens in rows.items()}

    def fill(self, row: int, content: Mapping[str, Array]) -> None:
        self._check_content(content)
        for name in self.cache_names:
            one = content[present_of(name)]
            self._cache[name][row, :, : one.shape[1]] = one
            self._lengths[row] = one.shape[1]

    def cache(self, row: int) -> dict[str, Array]:
        length = self._lengths[row]
        return {present_of(name): content[row, :, :length] for name, content in self._cache.items()}

    def _run(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        first, last = min(rows), max(rows)
        window = slice(first, last + 1)
        widest = max(len(tokens) for tokens in rows.values())
        ids = np.zeros((last + 1 - first, widest), np.int64)
        counts = np.ones(len(ids), np.int64)
        for row, tokens in rows.items():
            ids[row - first, : len(tokens)], counts[row - first] = tokens, len(tokens)
        ends = self._lengths[window] + counts
        feed: dict[str, Array] = {
            INPUT_IDS: ids,
            SEQLENS_K: (ends - 1).astype(np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(ends.max(), np.int32),
            LOGITS_POSITIONS: np.broadcast_to(np.arange(widest), ids.shape).copy(),
        }
        feed[POSITION_IDS] = self._lengths[window, None] + np.arange(widest)
        # A graph from the middle of a lowering may still return the logits of all tokens.
        given = {name: value for name, value in feed.items() if name in self.inputs}
        logits = self._bind_and_run(given, window)
        for row, tokens in rows.items():
            self._lengths[row] += len(tokens)
        return {row: logits[row - first, : len(tokens)] for row, tokens in rows.items()}

    def _bind_and_run(self, feed: dict[str, Array], window: slice) -> Logits:
        """Run with the cache's inputs and outputs bound to the same memory."""
        import onnxruntime

        binding = self.session.io_binding()
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for name in self.cache_names:
            buffer = onnxruntime.OrtValue.ortvalue_from_numpy(self._cache[name][window])
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(present_of(name), buffer)
        binding.bind_output(LOGITS)
        with running(self.name):
            self.session.run_with_iobinding(binding)
        logits: Logits = binding.get_outputs()[-1].numpy()  # in the order they were bound
        return logits


def runner(model: Path, *, slots: int = 4, max_length: int = 256, name: str | None = None) -> GraphRunner:
    """Open a graph by the contract that its inputs follow, or as one without a cache."""
    session = open_session(model, name)
    names = {value.name for value in session.get_inputs()}
    if names <= _TOKENS:
        return WholeRunner(model, session, name)
    if SEQLENS_K in names and ATTENTION_MASK not in names:
        return SlotGraphRunner(model, session, name, slots=slots, max_length=max_length)
    return PortableRunner(model, session, name)


def is_decoder(graph: ir.Graph) -> bool:
    """Return whether a graph follows one of the two contracts, or maps tokens to logits without a cache."""
    inputs = {str(value.name) for value in graph.inputs}
    logits = next((value for value in graph.outputs if value.name == LOGITS), None)
    if logits is None or INPUT_IDS not in inputs:
        return False
    of_tokens = logits.shape is not None and len(logits.shape) == 3
    return any(map(is_past, inputs)) or (inputs <= _TOKENS and of_tokens)


def _padded(array: Array, length: int, axis: int) -> Array:
    """Pad with zeros on the left along ``axis``."""
    widths = [(length - size if number == axis else 0, 0) for number, size in enumerate(array.shape)]
    return np.pad(array, widths)


def _ones(lengths: Iterable[int], width: int) -> Tokens:
    """Return a mask [rows, width] that is 1 at the last ``length`` places of each row."""
    return np.stack([np.arange(width) >= width - length for length in lengths]).astype(np.int64)
