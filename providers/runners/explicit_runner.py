"""The runner of graphs with explicit KV (past in, present out), one sequence per run.

It is for targets without an attention kernel that updates a cache in place. Each run returns longer caches,
which stay on the device and are inputs of the next run.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...contract import (
    ATTENTION_MASK,
    ENCODER_MASK,
    ENCODER_STATES,
    EXPLICIT_KV,
    HIDDEN_STATES,
    IMAGE_AHEAD,
    IMAGE_ROWS,
    IMAGE_STATES,
    INPUT_IDS,
    LOGITS_POSITIONS,
    POSITION_IDS,
    ROPE_POSITIONS,
)
from ...errors import ProviderRuntimeError, UsageError
from ..base import LoraMatrices, Row, Runner, RunnerConfig
from ..captures import no_capture
from ..image_rows import image_ahead, image_inputs, rope_positions
from ..kv.decoder_graph import DecoderGraph
from ..kv_groups import EncoderKV, FullKV, KVGroups, StateKV
from ..lora import LoraPlaces
from ..row_checks import check_rows
from .replays import Replays

_log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]


class ExplicitSession(Protocol):
    """An open graph. Cache values have the target's own type and stay on its device.

    All methods raise ``ProviderRuntimeError`` on failure.
    """

    graph: DecoderGraph

    def run(
        self, feeds: Mapping[str, npt.NDArray[Any]], past: Sequence[Any], states: Logits | None = None
    ) -> tuple[Logits, list[Any]]:
        """Run once.

        Args:
            feeds: all inputs except the caches.
            past: values of the caches, then those of the recurrent states, then those of an encoder's rows.
            states: [tokens, hidden_width], filled with the last hidden states; None if they are not wanted.

        Returns:
            Logits [sequence or wanted, vocab_size], and values of the longer caches and the new states.
        """

    def to_host(self, value: Any) -> npt.NDArray[Any]:
        """Return the content of a value."""

    def from_host(self, array: npt.NDArray[Any]) -> Any:
        """Return a value with the content of a contiguous array, which must not change afterwards."""


def warn_of_explicit_kv(metadata: Mapping[str, str], otherwise: str = "the graph has explicit KV") -> None:
    """Log why a target that has attention kernels runs a graph without them.

    Args:
        metadata: the graph's; it has the reason if an attention has no kernel.
        otherwise: the reason else.
    """
    reason = metadata.get(EXPLICIT_KV, otherwise)
    _log.warning("sequences run one by one and copy their KV at each step, which is slower: %s", reason)


class ExplicitRunner(Runner):
    """The ``Runner`` of targets that support standard operators only.

    Args:
        session: an open graph.
        config: options of the runner.
        source: the name of the model in error messages.
        chunk: maximum tokens of a row in one run.

    Raises:
        UsageError: the context length is unknown.
    """

    def __init__(
        self, session: ExplicitSession, config: RunnerConfig, source: str, *, chunk: int = 512
    ) -> None:
        self._session: ExplicitSession | None = session
        self._graph, self._chunk = session.graph, chunk
        self.info = self._graph.info(
            config,
            _groups(self._graph),
            length=_context_length(self._graph, config, source),
            batched_multi_token=False,
            # KV alone does not say which encoder's rows it attended to.
            kv_layout="" if self._graph.encoder_width else _layout(self._graph),
            state_arrays=len(self._graph.states),
        )
        self._loras = LoraPlaces(self._graph.lora_modules, config.max_loras, config.max_lora_rank)
        # Values by slot: caches in the order of the inputs, and states by the length that they sum up.
        self._past: dict[int, list[Any]] = {}
        self._states: dict[int, dict[int, list[Any]]] = {}
        self._encoded: dict[int, list[Any]] = {}  # by slot, keys and values of an encoder's rows
        self._replays = Replays()
        self._lengths = np.zeros(config.max_slots, np.int64)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        session = self._opened()
        extended = self._replays.extended(rows) if self._graph.states else rows
        check_rows(extended, self.info, self._lengths, self._graph.hidden_size)
        computed = [self._run_row(session, row) for row in extended]
        for row, (_, past, states, encoded) in zip(rows, computed, strict=True):
            self._past[row.slot], self._states[row.slot] = past, states
            self._encoded[row.slot] = encoded
            self._lengths[row.slot] = row.start + len(row.tokens)
        if self._graph.states:
            self._replays.ran(rows, extended)
        return [logits for logits, *_ in computed]

    @property
    def kv_bytes(self) -> int:
        """Memory of the caches in bytes; shared caches count once."""
        lengths = {id(past): int(self._lengths[slot]) for slot, past in list(self._past.items())}
        states = {id(state) for kept in list(self._states.values()) for state in list(kept.values())}
        encoded = {id(rows): self._encoded_bytes(rows) for rows in list(self._encoded.values())}
        held = self.info.kv_bytes_per_token * sum(lengths.values()) + self.info.state_bytes * len(states)
        return held + sum(encoded.values())

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length); if that is all the slot holds, both slots share it."""
        if length > self._lengths[source]:
            raise ProviderRuntimeError(f"slot {source} holds {self._lengths[source]} tokens, not {length}")
        session, before = self._opened(), self._replays.state_before(source, length)
        past, state = self._cut(session, source, length), self._state(session, source, before)
        earlier = {n: kept for n, kept in self._states.get(source, {}).items() if n < before}
        self._past[target], self._states[target] = past, {**earlier, before: state}
        self._encoded[target] = self._encoded.get(source, [])
        self._lengths[target] = length
        self._replays.share(source, target, length)

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; see ``Runner``."""
        self._loras.write(place, matrices)

    def release(self, slot: int) -> None:
        """Free the slot's caches."""
        self._past.pop(slot, None)
        self._states.pop(slot, None)
        self._encoded.pop(slot, None)
        self._replays.release(slot)
        self._lengths[slot] = 0

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return KV of [start, start + length), [heads, length, width] of each cache."""
        session, held = self._opened(), int(self._lengths[slot])
        if start + length > held:
            raise ProviderRuntimeError(f"slot {slot} holds {held} tokens, not {start + length}")
        past = self._cut(session, slot, held)
        return [session.to_host(value)[0, :, start : start + length] for value in past]

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the result of ``read_kv`` behind the first ``start`` positions of a slot."""
        session = self._opened()
        if start > self._lengths[slot] or start + length > self.info.context_length:
            raise ProviderRuntimeError(f"positions [{start}, {start + length}) do not continue slot {slot}")
        shapes = [(spec.heads, length, spec.width) for spec in self._graph.caches.values()]
        if [part.shape for part in parts] != shapes:
            raise ProviderRuntimeError(f"the KV has another layout than {self.info.kv_layout}")
        before = [session.to_host(value)[0, :, :start] for value in self._cut(session, slot, start)]
        joined = (np.concatenate(pair, axis=1)[None] for pair in zip(before, parts, strict=True))
        self._past[slot] = [session.from_host(np.ascontiguousarray(array)) for array in joined]
        self._lengths[slot] = start + length

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the recurrent state after ``length`` tokens; see ``Runner``."""
        session, states = self._opened(), self._states.get(slot, {}).get(length)
        if not states:
            raise ProviderRuntimeError(f"slot {slot} has no state after {length} tokens")
        return [session.to_host(value)[0] for value in states]

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write the recurrent state after ``length`` tokens; see ``Runner``."""
        session, held = self._opened(), int(self._lengths[slot])
        if length != held:
            raise ProviderRuntimeError(f"slot {slot} holds {held} tokens, not {length}")
        if [part.shape for part in parts] != [tuple(shape) for shape in self._graph.states.values()]:
            raise ProviderRuntimeError(f"the state has another layout than {self.info.kv_layout}")
        self._replays.release(slot)  # its tokens are those of another text
        copies = [session.from_host(np.array(part[None], np.float32)) for part in parts]
        self._states.setdefault(slot, {})[length] = copies

    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""
        with no_capture():  # a device frees the session
            self._past.clear()
            self._states.clear()
            self._encoded.clear()
            self._session = None

    def _opened(self) -> ExplicitSession:
        if self._session is None:
            raise ProviderRuntimeError("the runner is closed")
        return self._session

    def _run_row(
        self, session: ExplicitSession, row: Row
    ) -> tuple[Logits, list[Any], dict[int, list[Any]], list[Any]]:
        """Run a row; return its logits and caches, the states kept by length, and its encoder's rows."""
        past, state = self._cut(session, row.slot, row.start), self._state(session, row.slot, row.start)
        kept = {n: old for n, old in self._states.get(row.slot, {}).items() if n in row.checkpoints}
        encoded = self._rows_before(session, row)
        parts = []
        for begin, end in self._pieces(row):
            first = min(max(begin, len(row.tokens) - row.num_logits), end)
            states = None if row.last_hidden_states is None else row.last_hidden_states[begin:end]
            feeds = self._feeds(row, begin, end, first) | self._new_rows(session, row, encoded)
            logits, present = session.run(feeds, [*past, *state, *encoded], states)
            ends = len(past), len(past) + len(state)
            past, state, encoded = present[: ends[0]], present[ends[0] : ends[1]], present[ends[1] :]
            parts.append(logits[len(logits) - (end - first) :])
            if row.start + end in row.checkpoints:
                kept[row.start + end] = state
        return np.concatenate(parts), past, {**kept, row.start + len(row.tokens): state}, encoded

    def _rows_before(self, session: ExplicitSession, row: Row) -> list[Any]:
        """Return the keys and values of the encoder's rows that a row finds; none where a text begins.

        Raises:
            ProviderRuntimeError: the slot has none, and the row brings none.
        """
        if not self._graph.encoder_width or row.start:
            if self._graph.encoder_width and not self._encoded.get(row.slot):
                raise ProviderRuntimeError(f"slot {row.slot} holds no rows of an encoder")
            return self._encoded.get(row.slot, [])
        if row.encoder is None or row.encoder.states.shape[1:] != (self._graph.encoder_width,):
            raise ProviderRuntimeError(
                f"slot {row.slot} begins without an encoder output that fits the graph"
            )
        empty = [
            np.zeros((1, spec.heads, 0, spec.width), spec.dtype)
            for spec in self._graph.encoder_caches.values()
        ]
        return [*map(session.from_host, empty)]

    def _new_rows(
        self, session: ExplicitSession, row: Row, encoded: list[Any]
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs for the encoder's rows: all of them in the first run of a text, then none."""
        if not self._graph.encoder_width:
            return {}
        held = session.to_host(encoded[0]).shape[2]
        new = (
            row.encoder.states
            if row.encoder is not None and not held
            else np.empty((0, self._graph.encoder_width))
        )
        feeds = {
            ENCODER_STATES: np.ascontiguousarray(new, np.float32)[None],
            ENCODER_MASK: np.ones((1, held + len(new)), np.int64),
        }
        return {name: array for name, array in feeds.items() if name in self._graph.inputs}

    def _encoded_bytes(self, encoded: Sequence[Any]) -> int:
        session = self._session
        return 0 if session is None else sum(session.to_host(value).nbytes for value in encoded)

    def _pieces(self, row: Row) -> Iterator[tuple[int, int]]:
        """Yield the first and last token of each run; a state is known only where a run ends.

        Tokens of a picture that see all of it are in one run.
        """
        size = len(row.tokens)
        ends = {length - row.start for length in row.checkpoints if row.start < length}
        inside = () if row.image_ahead is None else (np.flatnonzero(row.image_ahead) + 1).tolist()
        places = sorted({0, *({*range(0, size, self._chunk), *ends} - {*inside}), size})
        yield from itertools.pairwise(places)

    def _feeds(self, row: Row, begin: int, end: int, first: int) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs for tokens [begin, end) of a row; tokens from ``first`` on want logits."""
        start, total = row.start + begin, row.start + end
        # At least one logit row is computed, even if none is wanted.
        wanted = np.arange(min(first, end - 1) - begin, end - begin, dtype=np.int64)
        feeds: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.ascontiguousarray(row.tokens[begin:end], np.int64)[None],
            ATTENTION_MASK: np.ones((1, total), np.int64),
            POSITION_IDS: np.arange(start, total, dtype=np.int64)[None],
            LOGITS_POSITIONS: wanted[None],
        }
        if self._loras.modules:
            feeds |= self._loras.inputs([row.lora]).feeds
        if self._graph.image_width:
            states, rows = image_inputs([row], self._graph.image_width)
            feeds |= {IMAGE_STATES: states, IMAGE_ROWS: rows[None, begin:end]}
        if self._graph.image_ahead:
            feeds[IMAGE_AHEAD] = image_ahead([row])[None, begin:end]
        if self._graph.rope_axes:
            positions = rope_positions([row], [row.start], self._graph.rope_axes)
            feeds[ROPE_POSITIONS] = positions[:, None, begin:end]
        if row.hidden_states is not None:
            feeds[HIDDEN_STATES] = np.ascontiguousarray(row.hidden_states[begin:end], np.float32)[None]
        return {name: array for name, array in feeds.items() if name in self._graph.inputs}

    def _cut(self, session: ExplicitSession, slot: int, length: int) -> list[Any]:
        """Return the caches of a slot's first ``length`` positions; shorter ones are copied on the host."""
        held = self._past.get(slot)
        if held is None or not length:
            empty = [
                np.zeros((1, spec.heads, 0, spec.width), spec.dtype) for spec in self._graph.caches.values()
            ]
            return [*map(session.from_host, empty)]
        if length == self._lengths[slot]:
            return held
        shorter = (np.ascontiguousarray(session.to_host(value)[:, :, :length]) for value in held)
        return [session.from_host(array) for array in shorter]

    def _state(self, session: ExplicitSession, slot: int, length: int) -> list[Any]:
        """Return the states after a slot's first ``length`` tokens, empty without layers that have any.

        Raises:
            ProviderRuntimeError: there is no checkpoint, and a state cannot be cut.
        """
        if slot not in self._past or not length:
            zeros = [np.zeros((1, *shape), np.float32) for shape in self._graph.states.values()]
            return [*map(session.from_host, zeros)]
        state = self._states.get(slot, {}).get(length)
        if state is None and self._graph.states:
            raise ProviderRuntimeError(f"slot {slot} has no state after {length} tokens")
        return state or []


def _groups(graph: DecoderGraph) -> KVGroups:
    caches = FullKV(sum(spec.bytes_per_token for spec in graph.caches.values()))
    if graph.encoder_width:
        row_bytes = sum(spec.bytes_per_token for spec in graph.encoder_caches.values())
        return (caches, EncoderKV(row_bytes=row_bytes, most_rows=graph.encoder_rows))
    if not graph.states:
        return (caches,)
    states = StateKV(state_bytes=4 * sum(math.prod(shape) for shape in graph.states.values()))
    return (caches, states) if graph.caches else (states,)


def _layout(graph: DecoderGraph) -> str:
    """Return what ``read_kv`` returns, for ``RunnerInfo.kv_layout``."""
    shapes = (
        f"{name} {spec.dtype.name}[{spec.heads}, n, {spec.width}]" for name, spec in graph.caches.items()
    )
    states = (f"{name} float32{list(shape)}" for name, shape in graph.states.items())
    return f"explicit: {'; '.join([*shapes, *states])}"


def _context_length(graph: DecoderGraph, config: RunnerConfig, source: str) -> int:
    length = config.context_length or graph.context_length
    if not length:
        raise UsageError(f"{source} does not state its context length; set RunnerConfig.context_length")
    return length
