"""A runner that splits one model by layers over several runners."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ..base import KVEviction, Row, Runner, RunnerInfo


class SplitRunner(Runner):
    """A ``Runner`` that passes hidden states from part to part.

    Args:
        parts: runners of consecutive layers (see ``graph_opt.analysis.layers``); all except the last return
            hidden states as logits. They are closed with this runner.
    """

    def __init__(self, parts: Sequence[Runner]) -> None:
        self._parts = list(parts)
        infos = [part.info for part in parts]
        layouts = [info.kv_layout for info in infos]
        self.info = RunnerInfo(
            vocab_size=infos[-1].vocab_size,
            context_length=min(info.context_length for info in infos),
            max_slots=min(info.max_slots for info in infos),
            kv_groups=tuple(group for info in infos for group in info.kv_groups),
            batched_multi_token=all(info.batched_multi_token for info in infos),
            step_tokens=min(info.step_tokens for info in infos),
            kv_tokens=min((info.kv_tokens for info in infos if info.kv_tokens is not None), default=None),
            evicts_kv=all(info.evicts_kv for info in infos),
            kv_layout=" | ".join(layouts) if all(layouts) else "",
            state_arrays=sum(info.state_arrays for info in infos),
        )

    def forward(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """Run one step; see ``Runner.forward``. If a part fails, a repeated step writes the same KV again."""
        inputs = list(rows)
        for part in self._parts[:-1]:
            whole = [dataclasses.replace(row, num_logits=len(row.tokens)) for row in inputs]
            states = part.forward(whole)
            inputs = [
                dataclasses.replace(row, hidden_states=own) for row, own in zip(rows, states, strict=True)
            ]
        return self._parts[-1].forward(inputs)

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV caches of all parts, in bytes."""
        return sum(part.kv_bytes for part in self._parts)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length) from slot ``source`` to slot ``target``, in every part."""
        for part in self._parts:
            part.copy_prefix(source, target, length)

    def release(self, slot: int) -> None:
        """Free the slot's memory in every part."""
        for part in self._parts:
            part.release(slot)

    def trim(self, slot: int, length: int) -> None:
        for part in self._parts:
            if part.info.trim_step:
                part.trim(slot, length)

    def evict_kv(self, slot: int, length: int, eviction: KVEviction) -> None:
        for part in self._parts:
            part.evict_kv(slot, length, eviction)

    def read_kv(self, slot: int, start: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the KV of all parts, concatenated."""
        return [array for part in self._parts for array in part.read_kv(slot, start, length)]

    def write_kv(self, slot: int, start: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write its own arrays to each part."""
        taken = 0
        for part in self._parts:
            count = len(part.read_kv(slot, 0, 0))
            part.write_kv(slot, start, length, parts[taken : taken + count])
            taken += count
        if taken != len(parts):
            raise ProviderRuntimeError(f"the KV has another layout: {len(parts)} arrays instead of {taken}")

    def read_state(self, slot: int, length: int) -> list[npt.NDArray[Any]]:
        """Return the states of all parts that have any, concatenated."""
        having = [part for part in self._parts if part.info.state_arrays]
        return [array for part in having for array in part.read_state(slot, length)]

    def write_state(self, slot: int, length: int, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Write its own arrays to each part that has states."""
        if len(parts) != self.info.state_arrays:
            raise ProviderRuntimeError(
                f"the state has another layout: {len(parts)} arrays instead of {self.info.state_arrays}"
            )
        begin = 0
        for part in self._parts:
            end = begin + part.info.state_arrays
            if begin < end:
                part.write_state(slot, length, parts[begin:end])
            begin = end

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.close()
