"""The runner of graphs with explicit KV (past in, present out), one sequence per run.

It is for targets without an attention kernel that updates a cache in place. Each run returns longer caches,
which stay on the device and are inputs of the next run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...contract import ATTENTION_MASK, EXPLICIT_KV, HIDDEN_STATES, INPUT_IDS, LOGITS_POSITIONS, POSITION_IDS
from ...errors import ProviderRuntimeError, UsageError
from ..base import LoraMatrices, Row, Runner, RunnerConfig
from ..captures import no_capture
from ..kv.decoder_graph import DecoderGraph
from ..kv_groups import FullKV
from ..lora import LoraPlaces
from ..row_checks import check_rows

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
            past: values of the caches.
            states: [tokens, embedding_size], filled with the last hidden states; None if they are not wanted.

        Returns:
            Logits [sequence or wanted, vocab_size], and values of the longer caches.
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
        sizes = [spec.bytes_per_token for spec in self._graph.caches.values()]
        self.info = self._graph.info(
            config,
            (FullKV(sum(sizes)),),
            length=_context_length(self._graph, config, source),
            batched_multi_token=False,
            kv_layout=_layout(self._graph),
        )
        self._loras = LoraPlaces(self._graph.lora_modules, config.max_loras, config.max_lora_rank)
        self._past: dict[int, list[Any]] = {}  # values by slot, in the order of the cache inputs
        self._lengths = np.zeros(config.max_slots, np.int64)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        session = self._opened()
        check_rows(rows, self.info, self._lengths, self._graph.hidden_size)
        results, computed = [], {}
        for row in rows:
            logits, computed[row.slot] = self._run_row(session, row)
            results.append(logits)
        for row in rows:
            self._past[row.slot] = computed[row.slot]
            self._lengths[row.slot] = row.start + len(row.tokens)
        return results

    @property
    def kv_bytes(self) -> int:
        """Memory of the caches in bytes; shared caches count once."""
        lengths = {id(past): int(self._lengths[slot]) for slot, past in list(self._past.items())}
        return self.info.kv_bytes_per_token * sum(lengths.values())

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length); if that is all the slot holds, both slots share it."""
        if length > self._lengths[source]:
            raise ProviderRuntimeError(f"slot {source} holds {self._lengths[source]} tokens, not {length}")
        self._past[target] = self._cut(self._opened(), source, length)
        self._lengths[target] = length

    def load_lora(self, place: int, matrices: LoraMatrices) -> None:
        """Load an adapter into a place; see ``Runner``."""
        self._loras.write(place, matrices)

    def release(self, slot: int) -> None:
        """Free the slot's caches."""
        self._past.pop(slot, None)
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

    def close(self) -> None:
        """Free all resources. The runner cannot be used afterwards."""
        with no_capture():  # a device frees the session
            self._past.clear()
            self._session = None

    def _opened(self) -> ExplicitSession:
        if self._session is None:
            raise ProviderRuntimeError("the runner is closed")
        return self._session

    def _run_row(self, session: ExplicitSession, row: Row) -> tuple[Logits, list[Any]]:
        past, parts = self._cut(session, row.slot, row.start), []
        for begin, end in self._pieces(len(row.tokens)):
            first = min(max(begin, len(row.tokens) - row.num_logits), end)
            states = None if row.last_hidden_states is None else row.last_hidden_states[begin:end]
            logits, past = session.run(self._feeds(row, begin, end, first), past, states)
            parts.append(logits[len(logits) - (end - first) :])
        return np.concatenate(parts), past

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        yield from ((begin, min(begin + self._chunk, size)) for begin in range(0, size, self._chunk))

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
        if row.hidden_states is not None:
            feeds[HIDDEN_STATES] = np.ascontiguousarray(row.hidden_states[begin:end], np.float32)[None]
        return {name: array for name, array in feeds.items() if name in self._graph.inputs}

    def _cut(self, session: ExplicitSession, slot: int, length: int) -> list[Any]:
        """Return the caches of a slot's first ``length`` positions; shorter ones are copied on the host."""
        held = self._past.get(slot)
        if held is None or not length:
            return [
                session.from_host(np.zeros((1, spec.heads, 0, spec.width), spec.dtype))
                for spec in self._graph.caches.values()
            ]
        if length == self._lengths[slot]:
            return held
        shorter = (np.ascontiguousarray(session.to_host(value)[:, :, :length]) for value in held)
        return [session.from_host(array) for array in shorter]


def _layout(graph: DecoderGraph) -> str:
    """Return what ``read_kv`` returns, for ``RunnerInfo.kv_layout``."""
    shapes = (
        f"{name} {spec.dtype.name}[{spec.heads}, n, {spec.width}]" for name, spec in graph.caches.items()
    )
    return f"explicit: {'; '.join(shapes)}"


def _context_length(graph: DecoderGraph, config: RunnerConfig, source: str) -> int:
    length = config.context_length or graph.context_length
    if not length:
        raise UsageError(f"{source} does not state its context length; set RunnerConfig.context_length")
    return length
