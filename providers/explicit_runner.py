"""Runs sequences through a graph with explicit past and present, one sequence a run.

For targets without an attention kernel that works in place: every run returns longer caches, which stay on
the device and are the next run's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import GraphError, ProviderRuntimeError, UsageError
from . import ort
from .base import Row, RunnerConfig, RunnerInfo, check_rows
from .device_memory import Device
from .slot_graph import CONTEXT_LENGTH, HIDDEN_STATES, INPUT_IDS, LOGITS, TYPES, present_name
from .slot_memory import shared_value

_PAST = "past_key_values."
_MASK, _POSITIONS = "attention_mask", "position_ids"

Logits = npt.NDArray[np.float32]


class ExplicitRunner:
    """The ``Runner`` of providers that take standard operators only.

    Args:
        session: an opened session of a portable graph.
        config: slots and context.
        source: how error messages call the model.
        device: where caches stay between runs.
        chunk: most tokens of a row in one run.

    Raises:
        GraphError: the graph does not keep the portable contract.
        UsageError: the context length is unknown.
    """

    def __init__(
        self, session: Any, config: RunnerConfig, source: str, *, device: Device, chunk: int = 512
    ) -> None:
        self._session, self._device, self._chunk = session, device, chunk
        self._inputs = {value.name: value for value in session.get_inputs()}
        self._caches = [name for name in self._inputs if name.startswith(_PAST)]
        vocab_size = _vocab_size(session, self._caches, source)
        self._outputs = [value.name for value in session.get_outputs()]
        self.info = RunnerInfo(
            vocab_size=vocab_size,
            context_length=_context_length(session, config, source),
            max_slots=config.max_slots,
            kv_bytes_per_token=sum(self._empty(name).itemsize * self._width(name) for name in self._caches),
            batched_multi_token=False,
        )
        self._past: dict[int, list[Any]] = {}  # values by slot, in the order of the cache inputs
        self._lengths = np.zeros(config.max_slots, np.int64)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Run one step; see ``Runner.forward``."""
        self._check(rows)
        results, computed = [], {}
        try:
            for row in rows:
                logits, past = self._run_row(row)
                results.append(logits)
                computed[row.slot] = past
        except ort.runtime_errors() as error:
            raise ProviderRuntimeError(f"a run of {len(rows)} rows failed: {ort.one_line(error)}") from error
        for row in rows:
            self._past[row.slot] = computed[row.slot]
            self._lengths[row.slot] = row.start + len(row.tokens)
        return results

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length); where it is all of the slot's, both share it."""
        if length > self._lengths[source]:
            raise ProviderRuntimeError(f"slot {source} holds {self._lengths[source]} tokens, not {length}")
        self._past[target] = self._cut(source, length)
        self._lengths[target] = length

    def release(self, slot: int) -> None:
        """Free the slot's caches."""
        self._past.pop(slot, None)
        self._lengths[slot] = 0

    def trim(self, slot: int, length: int) -> None:
        """Nothing: all positions are kept."""

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """See ``Runner.read_kv``."""
        raise ProviderRuntimeError("KV on this device cannot be read")

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """See ``Runner.write_kv``."""
        raise ProviderRuntimeError("KV on this device cannot be written")

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""
        self._past.clear()
        self._session = None

    def _check(self, rows: Sequence[Row]) -> None:
        if self._session is None:
            raise ProviderRuntimeError("the runner is closed")
        states = self._inputs.get(HIDDEN_STATES)
        check_rows(rows, self.info, self._lengths, None if states is None else states.shape[-1])

    def _run_row(self, row: Row) -> tuple[Logits, list[Any]]:
        past, parts = self._cut(row.slot, row.start), []
        for begin, end in self._pieces(len(row.tokens)):
            logits, past = self._run(row, begin, end, past)
            first = max(begin, len(row.tokens) - row.num_logits)
            parts.append(logits[first - begin :] if first < end else logits[:0])
        return np.concatenate(parts), past

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        yield from ((begin, min(begin + self._chunk, size)) for begin in range(0, size, self._chunk))

    def _run(self, row: Row, begin: int, end: int, past: list[Any]) -> tuple[Logits, list[Any]]:
        start, total = row.start + begin, row.start + end
        feeds: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.ascontiguousarray(row.tokens[begin:end], np.int64)[None],
            _MASK: np.ones((1, total), np.int64),
            _POSITIONS: np.arange(start, total, dtype=np.int64)[None],
        }
        if row.hidden_states is not None:
            feeds[HIDDEN_STATES] = np.ascontiguousarray(row.hidden_states[begin:end], np.float32)[None]
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_ortvalue_input(name, shared_value(array))
        for name, value in zip(self._caches, past, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(LOGITS, "cpu")
        for name in self._caches:
            binding.bind_output(present_name(name), self._device.name, self._device.index)
        self._session.run_with_iobinding(binding)
        results = binding.get_outputs()  # in the order they were bound
        return results[0].numpy()[0], results[1:]

    def _cut(self, slot: int, length: int) -> list[Any]:
        """Caches of a slot's first ``length`` positions; through the host if that is not all it holds."""
        held = self._past.get(slot)
        if held is None or not length:
            return [shared_value(self._empty(name)) for name in self._caches]
        if length == self._lengths[slot]:
            return held
        return [shared_value(np.ascontiguousarray(value.numpy()[:, :, :length])) for value in held]

    def _empty(self, name: str) -> npt.NDArray[Any]:
        shape = self._inputs[name].shape
        return np.zeros((1, shape[1], 0, shape[3]), TYPES[self._inputs[name].type])

    def _width(self, name: str) -> int:
        shape = self._inputs[name].shape
        return int(shape[1] * shape[3])


def _vocab_size(session: Any, caches: Sequence[str], source: str) -> int:
    outputs = {value.name: value.shape for value in session.get_outputs()}
    lacking = [name for name in (LOGITS, *map(present_name, caches)) if name not in outputs]
    if not caches or lacking:
        what = f"no output '{lacking[0]}'" if lacking else "no KV cache inputs"
        raise GraphError(f"{source} has {what}; lower a portable decoder with provider.passes()")
    size = outputs[LOGITS][-1]
    if not isinstance(size, int):
        raise GraphError(f"{source}: the last axis of 'logits' must be the vocabulary size, not {size!r}")
    return size


def _context_length(session: Any, config: RunnerConfig, source: str) -> int:
    known = session.get_modelmeta().custom_metadata_map.get(CONTEXT_LENGTH)
    length = config.context_length or (int(known) if known and known.isdecimal() else 0)
    if length < 1:
        raise UsageError(f"{source} does not state its context length; give RunnerConfig.context_length")
    return length
